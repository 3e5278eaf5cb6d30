"""`tds` answers mistakes in a user's training loop or model with an error of one sentence, and no rank hangs."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tds
from tds.diagnose import strip_cpp_stacks
from tests.support import ends_of_script, on_ranks

mse = nn.functional.mse_loss


def _frozen() -> list[Any]:
    return [layer.requires_grad_(False) for layer in _two()]


def _two() -> list[Any]:
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


MISTAKES: dict[
    str, tuple[Any, Any, Any, type[Exception], str]
] = {  # mistake -> (layers, loss, function that makes train_batch's argument, error type, part of its message)
    "nothing learns": (_frozen, mse, iter, RuntimeError, "nothing to learn"),
    "no weights": (lambda: [nn.Identity(), nn.Identity()], mse, iter, RuntimeError, "nothing to learn"),
    "a detached loss": (_two, lambda out, y: mse(out.detach(), y), iter, RuntimeError, "loss_fn"),
    "a list": (_two, mse, list, TypeError, "iter(data)"),
    "a DataLoader": (_two, mse, torch.utils.data.DataLoader, TypeError, "iter(data)"),
    "no loss_fn": (_two, None, iter, TypeError, "no loss_fn"),
}


def _mistake(name: str) -> None:
    make, loss, of, kind, words = MISTAKES[name]
    net = tds.PipelineModule(make(), num_stages=1, loss_fn=loss)
    optimizer = torch.optim.SGD(list(net.parameters()) or [nn.Parameter(torch.zeros(1))], lr=0.1)
    engine = tds.initialize(model=net, optimizer=optimizer, config={"train_batch_size": 2})[0]
    with pytest.raises(kind) as error:
        engine.train_batch(of([(torch.ones(2, 4), torch.zeros(2, 4))]))
    assert words in str(error.value) and "--" not in str(error.value) and "\n" not in str(error.value)


def _all_mistakes() -> None:
    for name in MISTAKES:
        _mistake(name)


def test_each_mistake_is_a_sentence() -> None:
    on_ranks(1, _all_mistakes)


class Around(nn.Module):
    """A layer that wraps the module given to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class Model(nn.Module):
    """A whole model, of which each layer of a pipeline takes its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))


class Part(nn.Module):
    """A layer that takes one part of the model or of the list given to it."""

    def __init__(self, model: Any, at: int) -> None:
        super().__init__()
        self.part = (model if isinstance(model, list) else model.parts)[at]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.part(x)
        return found


def _first_and_last(kind: str) -> tuple[Any, Any]:
    """Return the first and the last layer of a pipeline."""
    spec = tds.pipe.LayerSpec
    first: Any = nn.Linear(4, 4, bias=False)
    last: Any = nn.Linear(4, 4, bias=False)
    if kind == "argument":
        return spec(Around, first), spec(Around, inner=first)
    if kind == "module":
        return first, first
    if kind == "weight":
        last.weight = first.weight
    if kind == "frozen":
        return first.requires_grad_(False), first
    if kind == "tied":
        return tuple(tds.pipe.TiedLayerSpec("key", Around, first, tied_weight_attr=["inner.weight"]) for _ in range(2))
    model = Model()
    if kind == "parts":
        return spec(Part, model, 0), spec(Part, model, 3)
    if kind == "untied embedder":
        return spec(Part, model=model, at=0), spec(Part, model=model, at=0)
    if kind == "list":
        return spec(Part, list(model.parts), 2), spec(Part, list(model.parts), 2)
    return first, last


def _all_of_one_object() -> dict[str, list[str]]:
    return {kind: _one_object(kind) for kind in SHARED}


def _one_object(kind: str) -> list[str]:
    first, last = _first_and_last(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net = tds.PipelineModule(
            [first, nn.Linear(4, 4), nn.Linear(4, 4), last], num_stages=2, loss_fn=mse, partition_method="uniform"
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        tds.initialize(model=net, optimizer=optimizer, config={"train_batch_size": 2})
    return [str(each.message) for each in said if "stages" in str(each.message)]


SHARED = {  # kind of weight on two stages -> its name in the warning, or None if there is no warning
    "module": "0.weight",
    "weight": "0.weight",
    "argument": "weight of argument 0 of layer 0",
    "untied embedder": "parts.0.weight of argument model of layer 0",
    "list": "weight of argument 0[2] of layer 0",
    "parts": None,
    "frozen": None,
    "tied": None,
    "neither": None,
}


def test_a_weight_that_two_stages_train_without_a_tie_is_named() -> None:
    first, second = on_ranks(2, _all_of_one_object)
    assert set().union(*second.values()) == set()
    for kind, name in SHARED.items():
        assert len(first[kind]) == (name is not None), kind
        for line in first[kind]:
            assert line.startswith(f"{name} is shared") and "layers 0, 3" in line


# ------------------------------------------------------------------- errors before the first step

START = """
import os, sys, torch
import tds as deepspeed
deepspeed.init_distributed(auto_mpi_discovery=False)
rank = int(os.environ["RANK"])
net = deepspeed.PipelineModule(
    [torch.nn.Linear(4, 4), torch.nn.Identity()], num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
if sys.argv[1] == "optimizer":
    optimizer, config = torch.optim.SGD(net.parameters(), lr=0.1), {"train_batch_size": 2}
else:
    optimizer, config = None, {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
deepspeed.initialize(model=net, optimizer=optimizer, model_parameters=list(net.parameters()), config=config)
"""


@pytest.mark.parametrize("where", ["optimizer", "initialize"])
def test_an_error_before_the_first_step_reaches_all_ranks(where: str, tmp_path: Path) -> None:
    """An error on one rank before the first step ends the other rank, too, even without a launcher."""
    (tmp_path / "train.py").write_text(START)
    (first_code, first_words), (second_code, second_words) = ends_of_script(2, tmp_path, "train.py", where, timeout=60)
    assert first_code == second_code == 1
    assert first_words.startswith("run stopped: rank 1 raised ValueError: optimizer got an empty parameter list")
    # torch may log that rank 0 closed its store.
    assert "run stopped" not in second_words and "Traceback" not in second_words


def test_stacks_of_cpp_are_left_out() -> None:
    text = (
        "RuntimeError: Connection closed by peer\nException raised from recvBytes at ../TCPStore.cpp:10 (most recent "
        "call first):\n"
        "frame #0: c10::Error::Error(std::string) + 0x96 (0x7f)\nframe #1: <unknown function> + 0x5ba "
        "(0x7f)\n\nafter it"
    )
    assert strip_cpp_stacks(text).split("\n") == ["RuntimeError: Connection closed by peer", "after it"]
    assert (
        strip_cpp_stacks("error\nC++ CapturedTraceback:\n#4 std::f from a.cpp:0\n#5 c10::g from b.cpp:0\n").strip()
        == "error"
    )
    assert strip_cpp_stacks("nothing #1 of the kind\nframe") == "nothing #1 of the kind\nframe"


# ------------------------------------------------------------------- layers that torch trains wrongly in bf16


class FloatNorm(nn.LayerNorm):
    """A norm that calls torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.0


class OwnNorm(nn.LayerNorm):
    """A norm with a forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


def _notes(make: Any, stages: int, precision: dict[str, Any]) -> str:
    net = tds.PipelineModule(make(), num_stages=stages, loss_fn=mse, partition_method="uniform")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        tds.initialize(model=net, optimizer=optimizer, config={"train_batch_size": 2, **precision})
    return said.getvalue()


def _norm_last() -> list[Any]:
    return [nn.Linear(4, 4), nn.LayerNorm(4)]


def _words_first() -> list[Any]:
    return [nn.Embedding(4, 4), nn.Linear(4, 4)]


def _notes_of_narrow_sums() -> dict[str, str]:
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return {
        "norm": _notes(_norm_last, 2, bf16),
        "words": _notes(_words_first, 2, bf16),
        "norm under autocast": _notes(_norm_last, 2, autocast),
        "words under autocast": _notes(_words_first, 2, autocast),
        "subclass": _notes(lambda: [nn.Linear(4, 4), FloatNorm(4)], 2, bf16),
        "own norm": _notes(lambda: [nn.Linear(4, 4), OwnNorm(4)], 2, bf16),
        "fp32": _notes(_norm_last, 2, {}),
    }


def test_layers_whose_gradients_torch_sums_in_bf16_are_named() -> None:
    said, silent = on_ranks(2, _notes_of_narrow_sums)
    assert {name for name, text in said.items() if "fp32" in text} == {
        "norm",
        "words",
        "norm under autocast",
        "subclass",
    }
    assert "nn.LayerNorm" in said["norm"] and "nn.Embedding" in said["words"]
    assert not any("fp32" in text for text in silent.values())
