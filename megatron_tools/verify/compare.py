"""Comparison of two runs of the same model in different layouts, down to the first layer that differs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from data_utils.cli import aligned

from .records import Place, Records, is_exact_split, join_parts

# Largest allowed difference between two tensors, relative to their root mean square. Another order of summation gives
# about 1e-7 in fp32 and 1e-16 in fp64; a bug gives 1e-3 and more.
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9}
# A gradient's error is relative to its own RMS, or to FLOOR times the RMS of all gradients if that is larger.
FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """One value that differs between a layout and the run in one process.

    name: the module or parameter in `layer` to which the value belongs. kind: class name of the module. error: relative
    error. words: description of the difference.
    """

    layer: str
    name: str
    kind: str
    error: float
    words: str

    def __str__(self) -> str:
        where = f"layer {self.layer}"
        inside = self.name.removeprefix(self.layer).strip(".")
        if inside:
            where += f", module {inside}"
        if self.kind:
            where += f" ({self.kind})"
        return f"{where}: {self.words}"


@dataclass
class Verdict:
    """Result for one layout, compared with the run in one process.

    loss, forward_error, gradient_error: largest relative errors, None if nothing could be compared.
    initial_values, forward: the first difference in network order.
    backward: the last gradient in network order that differs, so the first one in the backward pass.
    state: the first persistent buffer that differs after the last step, or weight whose copies then differ.
    others: number of further parameters with different gradients.
    weights, gradients: largest relative error of each parameter's initial value and of its gradient, by name.
    stopped: error message of a run that failed, so that nothing could be compared.
    """

    layout: str
    loss: float | None = None
    forward_error: float | None = None
    gradient_error: float | None = None
    loss_differs_at: int | None = None
    initial_values: Difference | None = None
    forward: Difference | None = None
    backward: Difference | None = None
    state: Difference | None = None
    others: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    stopped: str | None = None

    @property
    def agrees(self) -> bool:
        """True if all values agree with the values of the run in one process."""
        found = (self.initial_values, self.forward, self.backward, self.state, self.loss_differs_at, self.stopped)
        return all(each is None for each in found)


def error_of(value: Tensor, like: Tensor, floor: float = 0.0) -> float:
    """Return the RMS difference of two tensors [...], relative to the RMS of `like` or `floor`, whichever is larger."""
    if value.shape != like.shape:
        return math.inf
    if not like.numel():
        return 0.0
    a = value.double()
    b = like.double()
    size = b.square().mean().sqrt().item()
    distance = (a - b).square().mean().sqrt().item()
    if distance == 0.0:
        return 0.0
    scale = max(size, floor)
    relative = distance / scale if scale else math.inf
    return math.inf if math.isnan(relative) else relative


class Comparison:
    """Comparison of the run `other` with `one`, the run in a single process.

    tolerance: largest relative difference allowed.
    """

    def __init__(self, one: Records, other: Records, tolerance: float) -> None:
        self.one = one
        self.other = other
        self.tolerance = tolerance

    def verdict(self, layout: str) -> Verdict:
        """Compare everything that the runs recorded, and return the result. layout: name of the layout of `other`."""
        found = Verdict(layout)
        self._compare_losses(found)
        self._compare_initial_values(found)
        self._compare_outputs(found)
        self._compare_gradients(found)
        self._compare_buffers(found)
        self._compare_copies(found)
        return found

    @cached_property
    def _order(self) -> dict[str, int]:
        """Module name -> its position in the order in which the modules of the run `one` first returned an output."""
        order: dict[str, int] = {}
        for place in self.one.outputs:
            order.setdefault(place.name, len(order))
        return order

    def _when(self, parameter: str) -> tuple[int, str]:
        """Return the key that sorts parameters in network order: (position of its module in `_order`, its name)."""
        name = parameter
        while name := name.rpartition(".")[0]:
            if name in self._order:
                return self._order[name], parameter
        return -1, parameter

    def _difference(self, name: str, error: float, words: str) -> Difference:
        kind = self.one.kinds.get(name, "") or self.one.kinds.get(name.rpartition(".")[0], "")
        return Difference(self.one.layer_of(name), name, kind, error, words)

    def _compare_losses(self, found: Verdict) -> None:
        found.loss = 0.0
        for step, (a, b) in enumerate(zip(self.one.losses, self.other.losses, strict=True), start=1):
            error = abs(a - b) / max(abs(a), 1e-30)
            if math.isnan(error):
                error = math.inf
            found.loss = max(found.loss, error)
            if error > self.tolerance and found.loss_differs_at is None:
                found.loss_differs_at = step

    def _compare_initial_values(self, found: Verdict) -> None:
        """Find the first parameter whose initial values differ."""
        one = self.one.initial_values()
        other = self.other.initial_values()
        for name in sorted(one, key=self._when):
            error, words = _worst(one[name][0], other.get(name), "its initial value")
            found.weights[name] = error
            if error > self.tolerance and found.initial_values is None:
                words += "; use the same random seed on every rank"
                found.initial_values = self._difference(name, error, words)

    def _compare_outputs(self, found: Verdict) -> None:
        """Find the first layer whose output differs, and the first module that differs in this layer.

        Differences inside a layer whose output agrees do not count.
        """
        if any(rank["context"] > 1 for rank in self.other.ranks):
            found.not_compared.append(
                "layer outputs, because context-parallel ranks hold different slices of the sequence"
            )
            return
        if any(rank["cut_short"] for rank in (*self.one.ranks, *self.other.ranks)):
            found.not_compared.append("outputs beyond the 2 GiB that a rank records; use a smaller model or batch")
        errors = self._errors_of_outputs(found)
        layers = set(self.one.layers)
        bad = []
        bad_layers = []
        for place, error in errors.items():
            is_layer = place.name in layers
            if is_layer:
                found.forward_error = max(error, found.forward_error or 0.0)
            if error > self.tolerance:
                bad.append(place)
                if is_layer:
                    bad_layers.append(place)
        if not bad_layers and (found.loss_differs_at != 1 or not bad):
            return
        first = bad[0]
        if bad_layers:
            layer = bad_layers[0]
            name = self.one.layer_of(layer.name)
            inside = [place for place in bad if place.micro == layer.micro and self.one.layer_of(place.name) == name]
            first = inside[0]
        found.forward = self._difference(first.name, errors[first], self._words(first, errors[first]))

    def _errors_of_outputs(self, found: Verdict) -> dict[Place, float]:
        """Return the relative error of each output that both runs recorded."""
        errors = dict[Place, float]()
        unlike = dict[str, None]()
        divided = any(rank["expert"] > 1 for rank in self.other.ranks)
        if divided:
            found.not_compared.append("outputs inside experts, because expert-parallel ranks exchange their tokens")
        for place, (like, *_) in self.one.outputs.items():
            parts = self.other.outputs.get(place)
            if parts is None:
                continue  # the run `other` did not record this micro-batch, or does not call this module
            if divided and ".experts." in place.name:
                continue
            wholes = join_parts(parts, like)
            if wholes is None:
                if place.name in self.one.layers:
                    errors[place] = math.inf
                else:
                    unlike[place.name] = None
                continue
            error = max(error_of(whole, like) for whole in wholes)
            if error > self.tolerance and not is_exact_split(parts, like):
                unlike[place.name] = None
            else:
                errors[place] = error
        if unlike:
            found.not_compared.append(f"outputs of {', '.join(unlike)}, which cannot be combined over ranks")
        return errors

    def _words(self, place: Place, error: float) -> str:
        """Describe the difference of an output: its shape or error, and the ranks that differ."""
        like = self.one.outputs[place][0]
        parts = self.other.outputs[place]
        wholes = join_parts(parts, like)
        if wholes is None:
            return (
                f"its output has shape {list(like.shape)} in one process but {_shapes(parts)} in this layout, "
                "so the ranks hold neither copies nor shards of it"
            )
        where = ""
        if len(wholes) > 1:
            bad = [str(i) for i, whole in enumerate(wholes) if error_of(whole, like) > self.tolerance]
            ranks = "ranks" if len(bad) > 1 else "rank"
            where = f" on model-parallel {ranks} {', '.join(bad)}"
        return (
            f"its output {list(like.shape)} differs by {error:.1e}{where} (micro-batch {place.micro}); "
            f"all earlier outputs agree"
        )

    def _compare_gradients(self, found: Verdict) -> None:
        """Find the last parameter, in network order, whose gradient differs."""
        one = self.one.gradients()
        other = self.other.gradients()
        total = 0.0
        count = 0
        for whole, *_ in one.values():
            total += whole.double().square().sum().item()
            count += whole.numel()
        floor = FLOOR * (total / max(count, 1)) ** 0.5
        words = {}
        for name in sorted(one, key=self._when):
            error, words[name] = _worst(one[name][0], other.get(name), "the gradient of this parameter", floor)
            found.gradients[name] = error
        for name in other.keys() - one.keys():
            found.gradients[name] = math.inf
            words[name] = "this parameter has a gradient in this layout but none in one process"
        found.gradient_error = max(found.gradients.values(), default=None)
        bad = [name for name, error in found.gradients.items() if error > self.tolerance]
        if bad:
            last = max(bad, key=self._when)
            why = f"{words[last]}; the gradients of all later parameters agree"
            found.backward = self._difference(last, found.gradients[last], why)
            found.others = len(bad) - 1

    def _compare_buffers(self, found: Verdict) -> None:
        """Find the first buffer that differs after the last step."""
        one = self.one.buffers()
        other = self.other.buffers()
        for name in sorted(one, key=self._when):
            like = one[name][0]
            worst = math.inf
            words = "a buffer is missing in this layout"
            if name in other:
                worst = max(error_of(_numbers(copy), _numbers(like)) for copy in other[name])
                words = f"the buffer {name} differs by {worst:.1e} after the last step"
            if worst > self.tolerance:
                words += "; all-reduce its inputs over the replicas or model-parallel ranks"
                found.state = self._difference(name, worst, words)
                return

    def _compare_copies(self, found: Verdict) -> None:
        """Find the first parameter whose copies differ after the last step, if all else agrees."""
        unequal = sorted(self.other.unequal_weights(), key=self._when)
        if unequal and found.agrees:
            words = "the copies of this parameter were equal, but differ after the last step; all-reduce its gradient"
            found.state = self._difference(unequal[0], math.inf, f"{words} over the ranks that hold a copy")


def _numbers(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _worst(like: Tensor, wholes: Sequence[Tensor] | None, what: str, floor: float = 0.0) -> tuple[float, str]:
    """Compare the ranks' copies `wholes` [full] of a tensor with `like` [full], the tensor of the run in one process.

    Returns (largest error, description of the error). what: name of the tensor in the description.
    """
    if not wholes:
        return math.inf, f"{what} is missing in this layout"
    if any(whole.shape != like.shape for whole in wholes):
        joined = join_parts(wholes, like)
        if joined is None:
            shapes = f"{list(like.shape)} in one process but {_shapes(wholes)} in this layout"
            return math.inf, f"{what} is {shapes}; declare how it is split"
        wholes = joined
    errors = [error_of(whole, like, floor) for whole in wholes]
    worst = max(errors)
    words = f"{what} differs by {worst:.1e}"
    if len(wholes) > 1:
        words += f" on copy {errors.index(worst)} of {len(errors)}"
        apart = max(error_of(whole, wholes[0], floor) for whole in wholes)
        if apart > worst / 100:
            words += ", and the copies differ from each other"
    return worst, words


def _shapes(parts: Sequence[Tensor]) -> str:
    return ", ".join(str(list(part.shape)) for part in parts)


def as_table(verdicts: Sequence[Verdict], tolerance: float) -> str:
    """Return a table with a row for each layout, followed by explanations of the differences."""
    rows = [("layout", "losses", "outputs", "gradients", "")]
    explanations = [f"largest relative differences from the run in one process (tolerance: {tolerance:g})"]
    for v in verdicts:
        result = "DIFFERS"
        if v.agrees:
            result = "agrees"
        elif v.stopped:
            result = "DID NOT RUN"
        rows.append((v.layout, _number(v.loss), _number(v.forward_error), _number(v.gradient_error), result))
        for words in explained(v):
            explanations.append(f"{v.layout}: {words}")
    return "\n".join([*aligned(rows), *explanations])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def explained(v: Verdict) -> list[str]:
    """Return sentences that say what differs and what the user should check."""
    lines: list[str] = []
    if v.stopped:
        lines.append(v.stopped)
    if v.initial_values:
        lines.append(f"initial values: {v.initial_values}")
    if v.forward:
        lines.append(f"forward: the first layer that differs is {v.forward}")
    elif v.loss_differs_at == 1:
        lines.append(
            "forward: the loss differs, but no module's output does; check the loss function and other code that runs "
            "outside modules"
        )
    if v.backward:
        words = f"backward: the last layer whose gradients differ is {v.backward}"
        if v.others:
            words += f" ({v.others} earlier parameters differ as well)"
        if v.forward:
            words += "; it may result from the forward difference"
        lines.append(words)
    elif not v.forward and (v.loss_differs_at or 0) > 1:
        lines.append(
            f"step 1 agrees, but the loss of step {v.loss_differs_at} differs; check all-reduces over replicas, the "
            f"optimizer, and buffers or other state that the model changes in a step"
        )
    if v.state:
        lines.append(f"state: {v.state}")
    for what in v.not_compared:
        lines.append(f"not compared: {what}")
    return lines
