"""Clients with an engine class of their own, derived from the PipelineEngine and built without `initialize`."""

import contextlib
import io
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.support import on_ranks

from .common import MICROS, STEPS, config, library, linears, mse, plain, samples, sgd, share, trained

CLIP = 0.05


def _client_engine(package: str) -> Any:
    """Return an engine that runs DeepSpeed's instructions in its own train_batch, with its own forward pass."""
    schedule = import_module(f"{package}.runtime.pipe.schedule")
    base: Any = import_module(f"{package}.runtime.pipe.engine").PipelineEngine

    def forward_pass(self: Any, buffer_id: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        outputs = super(base, self).forward(inputs)
        self.pipe_buffers["outputs"][buffer_id] = outputs
        if self.is_last_stage():
            self.loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
            self.fwd_outputs.append(self.loss.detach())
            total = 0.0 if self.total_loss is None else self.total_loss
            self.total_loss = total + self.loss.detach()

    class ClientEngine(base):  # type: ignore[misc]
        _INSTRUCTION_MAP = {**base._INSTRUCTION_MAP, schedule.ForwardPass: forward_pass}

        def train_batch(self, data_iter: Any = None) -> Any:
            self.set_dataiterator(data_iter)
            self.module.train()
            self.total_loss = None
            self._compute_loss = True
            self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
            return self._aggregate_total_loss()

        def eval_batch(self, data_iter: Any = None) -> Any:
            self.set_dataiterator(data_iter)
            self.module.eval()
            self._compute_loss = True
            with torch.no_grad():
                self._exec_schedule(schedule.InferenceSchedule(self.micro_batches, self.num_stages, self.stage_id))
            found = self._reduce_outputs(self.fwd_outputs) if self.is_last_stage() else None
            return self._bcast_pipe_scalar(found)

    return ClientEngine


def _built(package: str, stages: int) -> Any:
    """Build the client's engine as its own `initialize` does."""
    lib = library("tds" if package == "tds" else "stock")
    net = lib.PipelineModule(linears(), num_stages=stages, loss_fn=mse, partition_method="uniform")
    settings = config(CLIP)
    read = import_module("deepspeed.runtime.config").DeepSpeedConfig(settings, net.mpu())
    kind = _client_engine(package)
    return kind(args=None, model=net, optimizer=sgd(net), mpu=net.mpu(), config=settings, config_class=read)


def _losses(package: str, stages: int = 2) -> tuple[list[float], str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = _built(package, stages)
    data = samples() if stages == 2 else share()
    return trained(engine, data), said.getvalue()


def test_an_engine_derived_from_tds_clips_by_the_norm_of_all_stages() -> None:
    expected = plain(linears(), clip=CLIP)
    for found, said in on_ranks(2, _losses, "tds"):
        assert found == pytest.approx(expected, rel=1e-5)
        assert "warning" not in said


def test_an_engine_derived_from_tds_averages_over_replicas() -> None:
    expected = plain(linears(), clip=CLIP, micros=2 * MICROS)
    for found, _ in on_ranks(2, _losses, "tds", 1):
        assert found[:STEPS] == pytest.approx(expected[:STEPS], rel=1e-5)


def test_an_engine_derived_from_deepspeeds_is_reported_and_clips_wrongly() -> None:
    expected = plain(linears(), clip=CLIP)
    first, second = on_ranks(2, _losses, "deepspeed")
    assert first[0] == pytest.approx(second[0])
    assert first[0] != pytest.approx(expected, rel=1e-5)
    assert "ClientEngine" in first[1] and "tds.PipelineEngine" in first[1]
    assert "ClientEngine" not in second[1]


def _copied() -> str:
    """Build an engine that a client has copied from DeepSpeed's, derived from DeepSpeedEngine."""
    lib = library("tds")
    net = lib.PipelineModule(linears(), num_stages=2, loss_fn=mse, partition_method="uniform")
    settings = config(CLIP)
    read = import_module("deepspeed.runtime.config").DeepSpeedConfig(settings, net.mpu())

    class Copied(import_module("deepspeed").DeepSpeedEngine):  # type: ignore[misc]
        pass

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        Copied(args=None, model=net, optimizer=sgd(net), mpu=net.mpu(), config=settings, config_class=read)
    return said.getvalue()


def test_an_engine_copied_from_deepspeeds_is_reported() -> None:
    first, second = on_ranks(2, _copied)
    assert "Copied" in first and "tds.PipelineEngine" in first
    assert "Copied" not in second


def _chosen() -> list[float]:
    """Build a client's class, which it has put in place of DeepSpeed's, by `tds.initialize`."""
    import deepspeed

    import tds

    class Derived(tds.PipelineEngine):
        steps = 0

        def train_batch(self, data_iter: Any = None) -> Any:
            Derived.steps += 1
            return super().train_batch(data_iter)

    class Other(deepspeed.runtime.pipe.engine.PipelineEngine):  # type: ignore[misc]
        pass

    net = tds.PipelineModule(linears(), num_stages=1, loss_fn=mse)
    stock = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = Other
    with pytest.raises(ValueError, match="Other"):
        tds.initialize(model=net, optimizer=sgd(net), config=config())
    deepspeed.PipelineEngine = Derived
    engine = tds.initialize(model=net, optimizer=sgd(net), config=config())[0]
    deepspeed.PipelineEngine = stock
    found = trained(engine)
    assert Derived.steps == STEPS
    with pytest.raises(Exception, match="train_batch"):
        engine(next(samples())[0])
    assert set(super(tds.PipelineEngine, engine).module_state_dict()) == set(net.state_dict())
    return found


def test_a_class_in_place_of_deepspeeds_is_built_or_refused() -> None:
    (found,) = on_ranks(1, _chosen)
    assert found == pytest.approx(plain(linears()), rel=1e-5)
