"""tools/verify_layout.py finds typical bugs of a tensor-parallel layer and names the faulty layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples import pretrain_decoder as decoder
from megatron import mpu
from megatron.tasks import GPT2, T5
from megatron.training import pretrain, run
from megatron_tools.verify.compare import TOLERANCE, Comparison, Verdict, as_table
from megatron_tools.verify.layouts import ONE_PROCESS, Layout
from megatron_tools.verify.recorder import record_run
from megatron_tools.verify.records import Records
from tds.pipe import PipelineModule
from tests.support import covering, on_ranks

MICROS, STEPS, AT = 2, 2, 2  # AT: index of the faulty layer in the model


class Faulty(nn.Module):
    """Base class of faulty layers, [s, b, h] -> [s, b, h], that are right in one process only."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class NoGather(Faulty):
    """A layer that averages a column-parallel output over this rank's shard only, not over all shards."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.gate = mpu.ColumnParallelLinear(hidden_size, hidden_size, gather_output=False, init_method=mpu.normal(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        gate, _ = self.gate(hidden)
        return super().forward(hidden) * (1 + gate.mean(-1, keepdim=True))


class NoSum(NoGather):
    """A layer that computes a partial sum on each rank, but lacks the all-reduce of these sums."""

    def forward(self, hidden: Tensor) -> Tensor:
        gate, _ = self.gate(hidden)
        shares = hidden[..., : gate.shape[-1]]
        return hidden + (gate * shares.detach()).sum(-1, keepdim=True)


class OwnDropout(Faulty):
    """A layer whose dropout mask differs between ranks, since its seed is the rank."""

    def forward(self, hidden: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return hidden * (torch.rand(hidden.shape, generator=generator) > 0.1)


class OwnValues(Faulty):
    """A layer whose replicated weight is initialised differently on each rank."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        generator = torch.Generator().manual_seed(dist.get_rank())
        nn.init.normal_(self.scale, 1.0, 0.1, generator=generator)


class NoGradientSum(Faulty):
    """A layer that multiplies this rank's shard by a replicated weight, but lacks the all-reduce of its gradient."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.up = mpu.ColumnParallelLinear(hidden_size, hidden_size, gather_output=False)
        self.down = mpu.RowParallelLinear(hidden_size, hidden_size, input_is_parallel=True)
        self.head = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        inner, _ = self.up(hidden)
        inner = (inner.unflatten(-1, (-1, 4)) * self.head).flatten(-2)
        return super().forward(hidden) + self.down(inner)[0]


class OwnStatistics(Faulty):
    """A layer with a running mean over the data of one replica instead of all replicas; no output uses this mean."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.register_buffer("mean", torch.zeros(hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
        return super().forward(hidden)


class Drifts(Faulty):
    """A layer that changes its replicated weight on rank 1 by less than any tolerance, as an own gradient does."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.scale.data += 1e-6 * dist.get_rank()
        return super().forward(hidden)


def _decoder(fault: type[Faulty] | None) -> Callable[[], nn.Module]:
    class Block(decoder.TransformerBlockPipe):
        def __init__(self, hidden_size: int, heads: int) -> None:
            super().__init__(hidden_size, heads)
            self.extra = fault(hidden_size) if fault else nn.Identity()

        def forward(self, inputs: Any) -> Any:
            hidden, mask = super().forward(inputs)
            return self.extra(hidden), mask

    def provider() -> nn.Module:
        args = decoder.get_args()
        layers = decoder.layer_list(args.vocab_size, args.hidden_size, args.num_attention_heads, 3, args.seq_length)
        layers[AT].typename = Block
        if args.pipe_parallel_size == 0:
            return decoder.SequentialModule(layers)
        model = PipelineModule(layers, topology=mpu.get_topology(), loss_fn=decoder.loss_of(args.vocab_size))
        model._megatron_batch_fn = decoder.get_batch_pipe
        return model

    return provider


class NormForgets(GPT2):
    """A GPT-2 in which a norm's weight is a plain nn.Parameter, without `mpu.declare`.

    Under sequence parallelism, the weight's gradient covers this rank's tokens only and is not all-reduced.
    """

    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        model = super().model(config, tokenizer)
        for name, module in model.named_modules():
            if name.endswith("1.input_layernorm"):
                module.weight = nn.Parameter(module.weight.detach().clone())
        return model


class OwnExpert(GPT2):
    """A GPT-2 in which the last expert of layer 1 has other initial values on each rank."""

    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        model = super().model(config, tokenizer)
        for name, parameter in model.named_parameters():
            if "1.mlp.experts.3.dense_4h_to_h.weight" in name:
                parameter.data += 0.01 * dist.get_rank()
        return model


def _train(what: Any, folder: str, argv: list[str]) -> None:
    undo = record_run(Path(folder), STEPS)
    try:
        if isinstance(what, type) and issubclass(what, GPT2 | T5):
            run(what(), argv, exit=False)
        else:
            pretrain(
                decoder.train_valid_test_datasets_provider,
                _decoder(what),
                decoder.forward_step,
                argv=argv,
                exit=False,
            )
    finally:
        undo()


def _records(what: Any, layout: Layout, folder: Path, data: str, vocab: str, *more: str) -> Records:
    folder.mkdir()
    argv = ["--data-path", data, "--vocab-file", vocab, "--run-dir", str(folder / "run"), "--split", "90,10,0"]
    argv += [
        "--num-layers",
        "3",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "16",
        "--batch-size",
        "2",
        "--lr",
        "0.01",
    ]
    argv += [
        "--precision",
        "fp32",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--eval-iters",
        "0",
        "--no-save-at-end",
    ]
    argv += ["--train-iters", str(STEPS), "--lr-decay-iters", "10", *more, *layout.flags(MICROS)]
    on_ranks(layout.ranks, _train, what, str(folder), argv)
    return Records.read(folder, MICROS)


def _verdict(what: Any, layout: Layout, tmp_path: Path, data: str, vocab: str, *more: str) -> Verdict:
    one = _records(what, ONE_PROCESS, tmp_path / "one", data, vocab, *more)
    other = _records(what, layout, tmp_path / "other", data, vocab, *more)
    return Comparison(one, other, TOLERANCE["fp32"]).compare(str(layout))


EXPERTS = ("--num-experts", "4", "--expert-ff-hidden-size", "8", "--num-shared-experts", "1", "--router-z-loss", "0.1")
FORWARD = [(NoGather, ""), (NoSum, ""), (OwnDropout, "")]


@pytest.mark.parametrize("fault", covering([fault for fault, _ in FORWARD], lambda fault: fault is NoGather))
def test_a_wrong_output_is_named(fault: type[Faulty], tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = _verdict(fault, Layout(tp=2), tmp_path, tiny_data, vocab_file)
    assert not found.agrees and found.initial_values is None and found.forward
    assert (found.forward.layer, found.forward.name) == (f"{AT}", f"{AT}.extra")
    assert found.forward.kind == fault.__name__
    table = as_table([found], TOLERANCE["fp32"])
    assert (
        "DIFFERS" in table and f"the first layer that differs is layer {AT}, module extra ({fault.__name__})" in table
    )


def test_a_gradient_that_is_not_summed_is_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = _verdict(NormForgets, Layout(tp=2, sp=True), tmp_path, tiny_data, vocab_file)
    assert not found.agrees and found.forward is None and found.initial_values is None and found.backward
    assert found.backward.name == "layers.1.input_layernorm.weight" and found.further_gradients == 0
    assert "the copies differ from each other" in found.backward.description
    bad = {name for name, error in found.gradients.items() if error > TOLERANCE["fp32"]}
    assert bad == {"layers.1.input_layernorm.weight"}
    assert found.weights.keys() == found.gradients.keys() and max(found.weights.values()) == 0.0


@pytest.mark.full
def test_a_gradient_of_a_share_is_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = _verdict(NoGradientSum, Layout(tp=2), tmp_path, tiny_data, vocab_file)
    assert found.forward is None and found.backward and found.backward.name == f"{AT}.extra.head"


def test_an_expert_of_another_rank_is_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """With expert parallelism, only the second rank has this expert, so it is the only copy to compare."""
    found = _verdict(OwnExpert, Layout(dp=2, ep=2), tmp_path, tiny_data, vocab_file, *EXPERTS)
    wrong = {name for name, error in found.weights.items() if error}
    assert wrong == {"layers.1.mlp.experts.3.dense_4h_to_h.weight"}
    assert found.forward and found.forward.layer == "layers.1"


@pytest.mark.full
def test_initial_values_by_rank_are_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = _verdict(OwnValues, Layout(tp=2), tmp_path, tiny_data, vocab_file)
    assert found.initial_values and found.initial_values.name == f"{AT}.extra.scale"
    assert {name for name, error in found.weights.items() if error} == {f"{AT}.extra.scale"}
    assert "the same random seed" in found.initial_values.description


def test_a_buffer_that_differs_is_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = _verdict(OwnStatistics, Layout(dp=2), tmp_path, tiny_data, vocab_file)
    assert not found.agrees and found.forward is None and found.backward is None
    assert found.state and found.state.name == f"{AT}.extra.mean"


def test_copies_of_a_weight_that_become_unequal_are_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = _verdict(Drifts, Layout(dp=2), tmp_path, tiny_data, vocab_file)
    assert found.forward is None and found.backward is None and found.loss_differs_at is None
    assert not found.agrees and found.state and found.state.name == f"{AT}.extra.scale"


T5_FLAGS = ("--num-decoder-layers", "2", "--enc-seq-length", "24", "--dec-seq-length", "12", "--seq-length", "24")
RIGHT = [
    (GPT2, Layout(dp=2, ep=2), EXPERTS),
    (GPT2, Layout(pp=2, dp=2, ep=2, zero=1), EXPERTS),
    (GPT2, Layout(cp=2, ep=2), EXPERTS),
    (GPT2, Layout(tp=2), EXPERTS),
    (T5, Layout(dp=2, ep=2, zero=1), (*T5_FLAGS, *EXPERTS)),
    (None, Layout(pp=2, tp=2), ()),
    (None, Layout(dp=2, zero=2), ()),
    (GPT2, Layout(pp=2, dp=2, zero=1), ()),
    (GPT2, Layout(tp=2, sp=True), ("--checkpoint-activations",)),
    (GPT2, Layout(dp=2, zero=3), ()),
    (GPT2, Layout(cp=2), ()),
    (GPT2, Layout(pp=2, schedule="zb-h1"), ()),
    (GPT2, Layout(pp=1, tp=2), ()),
    (T5, Layout(pp=2, tp=2), T5_FLAGS),
]


@pytest.mark.parametrize(
    "what, layout, more",
    covering(RIGHT, lambda case: (case[0] is None and case[1].pp == 2) or case[1] == Layout(dp=2, ep=2), several=True),
)
def test_a_right_model_agrees(
    what: Any, layout: Layout, more: Any, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = _verdict(what, layout, tmp_path, tiny_data, vocab_file, *more)
    assert found.agrees, as_table([found], TOLERANCE["fp32"])
    assert found.gradient_error is not None and found.gradient_error < 1e-5
    assert (found.forward_error is None) == (layout.cp > 1)
    assert ("--num-experts" in more) == any(".experts.0." in name for name in found.gradients)
    assert all("experts" in words or layout.ep == 1 for words in found.not_compared) or layout.cp > 1
