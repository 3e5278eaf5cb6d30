"""Layers get process groups, options and random streams when they are built, so forward passes use no global state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import Config, ModelConfig
from megatron.config.sections import DataConfig, ParallelConfig
from megatron.model import GPT2Model, T5Model
from megatron.mpu import current
from tests.sentences import SENTENCES


class _NobodyToAsk:
    @property
    def context(self) -> Any:
        raise AssertionError("a pass asked for the mesh, the options or the streams of the process")


def _config(family: str, **model: Any) -> Config:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
    data = DataConfig(seq_length=8, enc_seq_length=8, dec_seq_length=6) if family == "t5" else DataConfig(seq_length=8)
    return Config(
        model=ModelConfig(**sizes, family=family, make_vocab_size_divisible_by=8, **model),
        data=data,
        parallel=ParallelConfig(checkpoint_activations=True),
    )


def _gpt2() -> tuple[Any, tuple[Tensor, ...]]:
    tokens = torch.arange(18).view(2, 9)
    return GPT2Model(_config("gpt2")), (tokens[:, :-1], tokens[:, 1:])


def _t5() -> tuple[Any, tuple[Tensor, ...]]:
    tokens = torch.arange(16).view(2, 8)
    config = _config("t5", position_embedding="relative", num_decoder_layers=1)
    return T5Model(config), (tokens, tokens[:, :6], tokens[:, 1:7])


@pytest.mark.parametrize("build", [_gpt2, _t5])
@pytest.mark.parametrize("parallel_output", [True, False])
def test_a_pass_asks_nobody(build: Any, parallel_output: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (*inputs, labels) = build()
    model.parallel_output = parallel_output
    monkeypatch.setattr(current, "_Current", _NobodyToAsk())
    if parallel_output:
        model(*inputs, labels=labels).mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    else:
        assert model(*inputs).shape[-1] == 64
    with pytest.raises(AssertionError, match=SENTENCES["asked_for_the_mesh"]):
        current.current_mesh()
