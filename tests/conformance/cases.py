"""Conformance cases: layers, data and settings that a pipeline engine must train like a single process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import probes
from .layers import (
    VOCAB,
    WIDTH,
    Copy,
    Counting,
    Decoder,
    Embed,
    End,
    InPlace,
    Joint,
    Keep,
    Middle,
    Nothing,
    Select,
    Start,
    Static,
    Table,
    Unused,
    UseTable,
    Widen,
)

MICROS, STEPS, ROWS = 6, 3, 4
Batch = tuple[Any, Tensor]


def mean_loss(out: Tensor, labels: Tensor) -> Tensor:
    return (out - labels).square().mean()


def size_loss(out: Tensor, labels: Tensor) -> Tensor:
    """Return a scalar: the mean squared difference between all rows of `out`, however many, and the first label row."""
    return (out - labels[:1]).square().mean()


class CountedLoss:
    """A loss of two named sums over the elements with positive labels. The engine divides both by `count_targets`."""

    def __call__(self, out: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept = labels > 0
        return {"fit": ((out - labels).square() * kept).sum(), "size": (out.square() * kept).sum() * 0.1}

    def count_targets(self, labels: Tensor) -> Tensor:
        return (labels > 0).sum()


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Tie:
    """A layer that shares its module with all layers whose tie has the same key.

    method: name of the method of the module that the layer calls; None: forward().
    """

    key: str
    method: str | None = None


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, the default of a Case. With SGD, unlike Adam, a wrong gradient scale changes the later losses."""
    return torch.optim.SGD(parameters, lr=0.3)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.02)


def adam_of_deepspeed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's equivalent of DeepSpeed's `{"type": "Adam"}`: AdamW, with a default weight decay of 0."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon optimizer as the reference uses it: Muon for matrices, AdamW for other weights."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) == matrices], "use_muon": matrices, "lr": 0.01}
        for matrices in (True, False)
    ]
    return MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A conformance case.

    layers: builds the modules, after seeding. ties: (layer index, its Tie). rows: for each step, the batch sizes of
    its micro-batches. feed: `fresh` batches are new tensors; `refilled` ones are the same tensors with new values;
    `dataset` yields the same tensors with the same values, which must not be modified. frozen: indices of frozen
    layers. optimizer: the optimizer of the reference, and of the pipeline unless `config` names one. module: further
    arguments of PipelineModule. prepare: is called with the PipelineModule. probe: a check after training (probes.py).
    only: dtypes for which the case is meaningful. slow: whether the case compiles something, which takes long.
    """

    name: str
    layers: Callable[[], list[nn.Module]]
    loss: Any = mean_loss
    ties: tuple[tuple[int, Tie], ...] = ()
    declared: tuple[tuple[str, list[Any]], ...] = ()
    rows: tuple[tuple[int, ...], ...] = ((ROWS,) * MICROS,) * STEPS
    clip: float = 0.0
    checkpoint: int = 0
    tokens: bool = False
    feed: str = "fresh"
    frozen: tuple[int, ...] = ()
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    config: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None
    probe: Callable[[probes.Trained], bool] | None = None
    autocast: bool = False
    slow: bool = False
    only: tuple[torch.dtype, ...] = (torch.float64, torch.float32)

    def build(self) -> list[nn.Module]:
        torch.manual_seed(3)
        built = self.layers()
        for index in self.frozen:
            built[index].requires_grad_(False)
        return built

    def batches(self, step: int, dtype: torch.dtype, replica: int = 0) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(5 + step + 1000 * replica)
        for rows in self.rows[step]:
            if self.tokens:
                ids = torch.randint(VOCAB, (2, rows, 5), generator=generator)
                yield ids[0], ids[1]
            else:
                x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
                yield x, y

    def feeds(self, dtype: torch.dtype, replica: int = 0) -> Iterator[Iterator[Batch]]:
        """Yield for each step the iterator of batches that the engine gets."""
        stored = list(self.batches(0, dtype, replica))
        for step in range(len(self.rows)):
            if self.feed == "dataset":
                yield iter(stored)
            elif self.feed == "refilled":
                yield _refill(self.batches(step, dtype, replica), stored[0])
            else:
                yield self.batches(step, dtype, replica)

    def expected(self, step: int, dtype: torch.dtype, replica: int = 0) -> list[Batch]:
        """Return the batches of a step, for the reference."""
        return list(self.batches(0 if self.feed == "dataset" else step, dtype, replica))


def _refill(batches: Iterator[Batch], into: Batch) -> Iterator[Batch]:
    for x, y in batches:
        into[0].copy_(x)
        into[1].copy_(y)
        yield into


def _chain(kinds: str, middle: Callable[[], nn.Module] = Middle) -> Callable[[], list[nn.Module]]:
    return lambda: [Start(kinds), *(middle() for _ in range(7)), End()]


def _plain() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(9)]


def _translation() -> list[nn.Module]:
    return [Start("grad bool"), Middle(), Middle(), *(Decoder(i == 0) for i in range(5)), End()]


def _tied() -> list[nn.Module]:
    embed, square = Embed(), Joint()
    extra = nn.Linear(WIDTH, WIDTH)
    return [embed, Widen(), square, Keep(extra), square, Joint(), Keep(extra), square, embed]


def _tables() -> list[nn.Module]:
    table = Table()
    return [Start("grad"), table, UseTable(), table, UseTable(), table, UseTable(), Middle(), End()]


def _one_tie(shared: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    def build() -> list[nn.Module]:
        tied = shared()
        return [Start("grad"), tied, Middle(), Middle(), tied, Middle(), Middle(), tied, End()]

    return build


def _case(kinds: str, **more: Any) -> Case:
    return Case(f"({kinds.replace(' ', ', ').replace('_', ' ')})", _chain(kinds), **more)


TIED = tuple((i, Tie("tie")) for i in (1, 4, 7))
FP32 = (torch.float32,)
CASES: Sequence[Case] = (
    _case("grad"),
    _case("grad float"),
    _case("grad int64"),
    _case("int64 grad"),
    _case("grad bool float"),
    _case("grad grad2 int16 empty"),
    _case("grad half bool int64 float"),
    _case("grad_fp64 grad_fp32 grad_bf16 grad_fp16 int64 int32 int16 uint8 bool scalar"),
    _case("grad complex64 bool complex128"),
    Case("layers that compute two tensors from two tensors, all with gradient", _chain("grad grad2", Joint)),
    Case("an encoder-decoder whose two halves send different tuples", _translation),
    Case("token ids as inputs, a tied embedding and two more tied layers", _tied, loss=token_loss, tokens=True, ties=(
        (0, Tie("embed")), (8, Tie("embed", "scores")), (2, Tie("square")), (4, Tie("square")), (7, Tie("square")),
        (3, Tie("extra")), (6, Tie("extra")))),
    Case("a weight as an output, tied over stages", _tables, ties=tuple((i, Tie("table")) for i in (1, 3, 5))),
    Case("stages without parameters", lambda: [Start("grad bool"), *(Nothing() for _ in range(7)), End()]),
    Case("split over tensor-parallel ranks", _chain("grad grad2 bool"), declared=(
        ("_input_grad", [True, True, False]), ("_input_type", ["float", "float", "bool"]),
        ("_input_pipe_partitioned", [True, False, True])), rows=((3,) * MICROS,) * STEPS),
    Case("named losses per target", _chain("grad grad2"), loss=CountedLoss()),
    Case("clipping by the global norm", _chain("grad"), clip=0.05),
    Case("another size each step", _chain("grad bool"), rows=((4,) * MICROS, (7,) * MICROS, (1,) * MICROS)),
    Case("another size each micro-batch", _chain("grad bool"), rows=((1, 3, 2, 3, 5, 4), (3, 3, 3, 3, 3, 2), (4,) * 6)),
    Case("activation checkpointing every 2 layers", _chain("grad"), checkpoint=2),
    Case("layers that change their inputs in place, with training_data=", lambda: [InPlace() for _ in range(9)],
         feed="dataset"),
    Case("layers that change one of several tensors in place", _chain("grad grad2 int64", Counting)),
    Case("a data iterator that fills the same tensors again", _chain("grad"), feed="refilled"),
    Case("the same, with targets counted first", _chain("grad"), feed="refilled", loss=CountedLoss()),
    Case("a frozen tied weight under AdamW", _one_tie(lambda: nn.Linear(WIDTH, WIDTH)), ties=TIED, frozen=(1, 4, 7),
         optimizer=adamw),
    Case("a tied weight that is not used, under AdamW", _one_tie(Unused), ties=TIED, optimizer=adamw),
    Case("an output that is the same memory each time", lambda: [*(Static() for _ in range(8)), Copy()]),
    Case("dynamic_shape, shapes that depend on the data", lambda: [Start("grad"), *(Select() for _ in range(3)), *(
        Middle() for _ in range(4)), End()], loss=size_loss, module={"dynamic_shape": True}),
    Case("dynamic_shape, another size each micro-batch", _chain("grad bool"), rows=((1, 3, 2, 3, 5, 4),) * STEPS,
         module={"dynamic_shape": True}),
    Case("recomputation with partition_activations", _chain("grad grad2"), checkpoint=1,
         prepare=probes.partition_activations, probe=probes.configured_back),
    Case("recomputation with contiguous activations", _plain, checkpoint=1,
         prepare=probes.contiguous_activations, probe=probes.evaluates_twice),
    Case("eval_batch(return_logits=True): the last micro-batch's", _plain, probe=probes.logits),
    Case("eval_batch(compute_loss=False, reduce_output=None)", _plain, probe=probes.all_outputs),
    Case(
        "eval_batch(compute_loss=False): mean of the outputs over micro-batches", _plain, probe=probes.mean_of_outputs
    ),
    Case("eval_batch(bcast_loss=False)", _plain, probe=probes.loss_stays),
    Case("the loss is fp32", _plain, probe=probes.loss_is_fp32, only=FP32),
    Case("attributes: fwd_outputs, loss, total_loss, agg_train_loss, timers", _plain, probe=probes.attributes),
    Case("get_additional_losses()", _plain, prepare=probes.give_additional_losses,
         probe=probes.additional_losses),
    Case("reset_activation_shape() between steps", _plain, probe=probes.reset_shapes),
    Case("a data iterator that ends with StopIteration, then the next epoch", _plain, probe=probes.next_epoch),
    Case("torch_autocast in bf16", _chain("grad"), autocast=True, only=FP32,
         config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    Case("torch_autocast in bf16, recomputed", _chain("grad"), autocast=True, only=FP32, checkpoint=2,
         config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    Case("flops_profiler", _chain("grad"), config={"flops_profiler": {"enabled": True, "profile_step": 1,
         "output_file": "/dev/null"}}, only=FP32),
    Case('{"type": "Adam"} of the ds_config', _chain("grad"), optimizer=adam_of_deepspeed,
         config={"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}),
    Case('{"type": "Adagrad"} of the ds_config', _chain("grad"), optimizer=adagrad,
         config={"optimizer": {"type": "Adagrad", "params": {"lr": 0.02}}}, only=FP32),  # Adagrad's states are fp32
    Case('{"type": "Muon"} of the ds_config', _plain, optimizer=muon,
         config={"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}, only=FP32, slow=True),
)  # fmt: skip
