from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron import mpu
from megatron.mpu.mesh import Axis
from megatron.training.model_checks import send_whole_shards
from tds import Boundary, BoundaryError
from tds.boundary import Contract, check_match, check_tensors, read_contract
from tests.sentences import SENTENCES

HIDDEN = torch.zeros(2, requires_grad=True) * 1
MASK = torch.zeros(2, dtype=torch.bool)


def test_the_lists_of_the_original_are_read() -> None:
    model = SimpleNamespace(
        _input_grad=[True, False], _input_type=["float", "bool"], _input_pipe_partitioned=[True, False]
    )
    found = read_contract(model, 1, {})
    assert found.outputs == found.inputs
    assert found.outputs[0] is not None
    assert [(b.kind, b.grad, b.split) for b in found.outputs[0]] == [("float", True, True), ("bool", False, False)]
    assert read_contract(SimpleNamespace(), 2, {}).outputs == (None, None)


def test_ranks_with_shards_of_the_sequence_send_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --sequence-parallel on 2 ranks, no tensor is sent in slices, although the model declares it."""
    split = Boundary("hidden", split=True)
    models: list[tuple[Any, int]] = [
        (SimpleNamespace(_input_pipe_partitioned=[True, False], _input_type=["float", "bool"]), 1),
        (SimpleNamespace(boundaries=[split], receives=None), 1),
        (SimpleNamespace(boundaries=[[split], None], receives=[None, [split]]), 2),
    ]
    for ranks in (1, 2):
        monkeypatch.setattr(mpu, "sequence_axis", lambda ranks=ranks: Axis(None, tuple(range(ranks)), 0))
        for model, chunks in models:
            send_whole_shards(model)
            contract = read_contract(model, chunks, {})
            declared = [each for each in (*contract.outputs, *contract.inputs) if each]
            assert [tensors[0].split for tensors in declared] == [ranks == 1] * len(declared) and declared


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"_input_grad": [True], "_input_type": ["float", "bool"]}, "_input_grad has 1, _input_type has 2"),
        ({"_input_type": ["half"]}, "kind 'half' is not one of float, int, bool"),
        ({"_input_grad": [True], "_input_type": ["int"]}, "is int, so it cannot have a gradient"),
    ],
)
def test_lists_that_cannot_be_are_refused(lists: dict[str, list[object]], message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        read_contract(SimpleNamespace(**lists), 1, {})


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((HIDDEN,), "stage 1: got 1 tensors, but 2 are declared: hidden, mask"),
        ((HIDDEN, MASK.float()), "stage 1: 'mask' is declared bool, got torch.float32"),
        ((HIDDEN, None), "stage 1: tensor 1 is NoneType"),
    ],
)
def test_what_differs_from_the_declaration_is_named(outputs: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        check_tensors(outputs, (Boundary("hidden"), Boundary("mask", "bool", grad=False)), "stage 1")


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    with pytest.raises(BoundaryError, match=SENTENCES["declared_without_gradient_but_has_one"]):
        check_tensors((HIDDEN,), (Boundary("hidden", grad=False),), "stage 0")


def test_what_fits_passes() -> None:
    check_tensors((HIDDEN, MASK), (Boundary("hidden"), Boundary("mask", "bool", grad=False)), "stage 0")
    check_tensors((HIDDEN, MASK), None, "stage 0")


def _stage(outputs: list[Boundary] | None, inputs: list[Boundary] | None, **settings: object) -> Contract:
    return read_contract(SimpleNamespace(boundaries=outputs, receives=inputs), 1, settings)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([_stage([Boundary("hidden")], None), _stage(None, [Boundary("hidden"), Boundary("mask", "bool", grad=False)])],
         r"stage 1 expects 2 tensors \(hidden, mask\) from stage 0, which outputs 1 \(hidden\)"),
        ([_stage(None, None), _stage([Boundary("hidden", split=True)], None), _stage(None, [Boundary("hidden")])],
         r"stage 2 expects .*split=False\) from stage 1, which outputs .*split=True\)"),
        ([_stage(None, None, schedule="gpipe"), _stage(None, None, schedule="1f1b")],
         "stage 1 runs with schedule = 1f1b, stage 0 with gpipe"),
    ],
)  # fmt: skip
def test_stages_that_do_not_fit_together_are_told_so(stages: list[Contract], message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        check_match(stages)


def test_chunks_have_borders_of_their_own() -> None:
    """Each model chunk has its own boundary: with interleaving, chunk 0 of stage 1 sends to chunk 1 of stage 0."""
    one, two = [Boundary("hidden")], [Boundary("decoded"), Boundary("encoded")]
    first = read_contract(SimpleNamespace(boundaries=[one, two], receives=[None, one]), 2, {})
    second = read_contract(SimpleNamespace(boundaries=[one, None], receives=[one, two]), 2, {})
    check_match([first, second])
    with pytest.raises(BoundaryError, match=SENTENCES["stage_1_expects_2_tensors_decoded"]):
        check_match([read_contract(SimpleNamespace(boundaries=[one, one]), 2, {}), second])
