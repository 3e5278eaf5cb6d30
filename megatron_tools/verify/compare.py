"""Comparison of two runs of the same model in different layouts, down to the first layer that differs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from data_utils.tables import align_columns

from .records import OutputKey, Records, is_exact_split, join_outputs

# Largest allowed difference between two tensors, relative to their root mean square. Another order of summation gives
# about 1e-7 in fp32 and 1e-16 in fp64; a bug gives 1e-3 and more.
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9}
# A gradient's error is relative to its own RMS, or to GRADIENT_FLOOR times the RMS of all gradients if that is larger.
GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """One value that differs between a layout and the run in one process.

    name: the module or parameter in `layer` to which the value belongs. kind: class name of the module. error: relative
    error. description: description of the difference.
    """

    layer: str
    name: str
    kind: str
    error: float
    description: str

    def __str__(self) -> str:
        where = f"layer {self.layer}"
        inside = self.name.removeprefix(self.layer).strip(".")
        if inside:
            where += f", module {inside}"
        if self.kind:
            where += f" ({self.kind})"
        return f"{where}: {self.description}"


@dataclass
class Verdict:
    """Result for one layout, compared with the run in one process.

    loss_error, forward_error, gradient_error: largest relative errors, None if nothing could be compared.
    initial_values, forward: the first difference in network order.
    backward: the last gradient in network order that differs, so the first one in the backward pass.
    state: the first persistent buffer that differs after the last step, or weight whose copies then differ.
    further_gradients: number of further parameters with different gradients.
    weights, gradients: largest relative error of each parameter's initial value and of its gradient, by name.
    run_error: error message of a run that failed, so that nothing could be compared.
    """

    layout: str
    loss_error: float | None = None
    forward_error: float | None = None
    gradient_error: float | None = None
    loss_differs_at: int | None = None
    initial_values: Difference | None = None
    forward: Difference | None = None
    backward: Difference | None = None
    state: Difference | None = None
    further_gradients: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    run_error: str | None = None

    @property
    def agrees(self) -> bool:
        """True if all values agree with the values of the run in one process."""
        found = (self.initial_values, self.forward, self.backward, self.state, self.loss_differs_at, self.run_error)
        return all(each is None for each in found)


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the RMS difference of two tensors [...], relative to the larger of the RMS of `expected` and `floor`.

    Infinite values, such as those of a causal mask, differ by 0 if they are equal, and do not count in the RMS.
    """
    if value.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    actual = _as_real(value).double()
    reference = _as_real(expected).double()
    reference_rms = _rms(reference.masked_fill(reference.isinf(), 0.0))
    difference_rms = _rms((actual - reference).masked_fill(actual == reference, 0.0))
    if difference_rms == 0.0:
        return 0.0
    scale = max(reference_rms, floor)
    relative = difference_rms / scale if scale else math.inf
    return math.inf if math.isnan(relative) else relative


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


@dataclass(frozen=True)
class Comparison:
    """Comparison of `run`, a run in a layout, with `reference`, the run in one process.

    tolerance: largest relative difference allowed.
    """

    reference: Records
    run: Records
    tolerance: float

    def compare(self, layout: str) -> Verdict:
        """Compare everything that the runs recorded, and return the result. layout: name of the layout of `run`."""
        verdict = Verdict(layout)
        self._compare_losses(verdict)
        self._compare_initial_values(verdict)
        self._compare_outputs(verdict)
        self._compare_gradients(verdict)
        self._compare_buffers(verdict)
        self._compare_copies(verdict)
        return verdict

    @cached_property
    def _module_order(self) -> dict[str, int]:
        """Module name -> its position in the order in which the modules of `reference` first returned an output."""
        order: dict[str, int] = {}
        for key in self.reference.outputs:
            order.setdefault(key.name, len(order))
        return order

    def _network_order(self, parameter: str) -> tuple[int, str]:
        """Return the key that sorts parameters in network order: (position of its module, its name)."""
        # The module of layers.0.mlp.weight is layers.0.mlp, or the next outer one that returned an output.
        name = parameter
        while name := name.rpartition(".")[0]:
            if name in self._module_order:
                return self._module_order[name], parameter
        return -1, parameter

    def _make_difference(self, name: str, error: float, words: str) -> Difference:
        kinds = self.reference.kinds
        kind = kinds.get(name, "") or kinds.get(name.rpartition(".")[0], "")
        return Difference(self.reference.layer_of(name), name, kind, error, words)

    def _compare_losses(self, verdict: Verdict) -> None:
        verdict.loss_error = 0.0
        pairs = zip(self.reference.losses, self.run.losses, strict=True)
        for step, (expected, loss) in enumerate(pairs, start=1):
            error = abs(expected - loss) / max(abs(expected), 1e-30)  # a loss may be 0
            if math.isnan(error):
                error = math.inf
            verdict.loss_error = max(verdict.loss_error, error)
            if error > self.tolerance and verdict.loss_differs_at is None:
                verdict.loss_differs_at = step

    def _compare_initial_values(self, verdict: Verdict) -> None:
        """Find the first parameter whose initial values differ."""
        expected = self.reference.initial_values()  # lists of one tensor, because one process holds one copy
        values = self.run.initial_values()
        for name in sorted(expected, key=self._network_order):
            error, description = _largest_error(expected[name][0], values.get(name), "its initial value")
            verdict.weights[name] = error
            if error > self.tolerance and verdict.initial_values is None:
                description += "; use the same random seed on every rank"
                verdict.initial_values = self._make_difference(name, error, description)

    def _compare_outputs(self, verdict: Verdict) -> None:
        """Find the first layer whose output differs, and the first module that differs in this layer.

        Differences inside a layer whose output agrees do not count.
        """
        if any(rank["context"] > 1 for rank in self.run.ranks):
            verdict.not_compared.append(
                "layer outputs, because context-parallel ranks hold different slices of the sequence"
            )
            return
        if any(rank["cut_short"] for rank in (*self.reference.ranks, *self.run.ranks)):
            verdict.not_compared.append("outputs beyond the 2 GiB that a rank records; use a smaller model or batch")
        errors = self._output_errors(verdict)
        layers = set(self.reference.layers)
        differing = []
        differing_layers = []
        for key, error in errors.items():
            is_layer = key.name in layers
            if is_layer:
                verdict.forward_error = max(error, verdict.forward_error or 0.0)
            if error > self.tolerance:
                differing.append(key)
                if is_layer:
                    differing_layers.append(key)
        counted = []  # outputs whose difference counts, in network order; the first one is reported
        if differing_layers:
            first_layer = differing_layers[0]
            layer = self.reference.layer_of(first_layer.name)
            for key in differing:
                if key.micro == first_layer.micro and self.reference.layer_of(key.name) == layer:
                    counted.append(key)
        # If all layers agree, a module that differs counts only if the loss of step 1 differs, too.
        elif verdict.loss_differs_at == 1:
            counted = differing
        if counted:
            first = counted[0]
            error = errors[first]
            verdict.forward = self._make_difference(first.name, error, self._describe_output(first, error))

    def _output_errors(self, verdict: Verdict) -> dict[OutputKey, float]:
        """Return the relative error of each output that both runs recorded."""
        errors = dict[OutputKey, float]()
        not_joinable = dict[str, None]()
        has_split_experts = any(rank["expert"] > 1 for rank in self.run.ranks)
        if has_split_experts:
            verdict.not_compared.append("outputs inside experts, because expert-parallel ranks exchange their tokens")
        for key, copies in self.reference.outputs.items():
            expected = copies[0]
            parts = self.run.outputs.get(key)
            if parts is None:
                continue  # this layout did not record this micro-batch, or does not call this module
            if has_split_experts and ".experts." in key.name:
                continue
            joined = join_outputs(parts, expected)
            if joined is None:
                if key.name in self.reference.layers:
                    errors[key] = math.inf
                else:
                    not_joinable[key.name] = None
                continue
            error = max(relative_error(output, expected) for output in joined)
            # Parts that include padding may have been joined in a wrong way, so their difference proves nothing.
            if error > self.tolerance and not is_exact_split(parts, expected):
                not_joinable[key.name] = None
            else:
                errors[key] = error
        if not_joinable:
            verdict.not_compared.append(f"outputs of {', '.join(not_joinable)}, which cannot be combined over ranks")
        return errors

    def _describe_output(self, key: OutputKey, error: float) -> str:
        """Describe the difference of an output: its shape or error, and the ranks that differ."""
        expected = self.reference.outputs[key][0]
        parts = self.run.outputs[key]
        joined = join_outputs(parts, expected)
        if joined is None:
            return (
                f"its output has shape {list(expected.shape)} in one process but {_list_shapes(parts)} in this layout, "
                "so the ranks hold neither copies nor shards of it"
            )
        where = ""
        if len(joined) > 1:
            bad_ranks = []
            for rank, output in enumerate(joined):
                if relative_error(output, expected) > self.tolerance:
                    bad_ranks.append(str(rank))
            ranks = "ranks" if len(bad_ranks) > 1 else "rank"
            where = f" on model-parallel {ranks} {', '.join(bad_ranks)}"
        return (
            f"its output {list(expected.shape)} differs by {error:.1e}{where} (micro-batch {key.micro}); "
            f"all earlier outputs agree"
        )

    def _compare_gradients(self, verdict: Verdict) -> None:
        """Find the last parameter, in network order, whose gradient differs."""
        expected = self.reference.gradients()
        gradients = self.run.gradients()
        # Gradients far smaller than the RMS of all gradients may consist of rounding errors; floor is that limit.
        squares = 0.0
        count = 0
        for gradient, *_ in expected.values():  # lists of one tensor, because one process holds one copy
            squares += _as_real(gradient).square().sum().item()
            count += gradient.numel()
        floor = GRADIENT_FLOOR * (squares / max(count, 1)) ** 0.5
        descriptions = {}
        for name in sorted(expected, key=self._network_order):
            error, descriptions[name] = _largest_error(
                expected[name][0], gradients.get(name), "the gradient of this parameter", floor
            )
            verdict.gradients[name] = error
        for name in gradients.keys() - expected.keys():
            verdict.gradients[name] = math.inf
            descriptions[name] = "this parameter has a gradient in this layout but none in one process"
        verdict.gradient_error = max(verdict.gradients.values(), default=None)
        differing = [name for name, error in verdict.gradients.items() if error > self.tolerance]
        if differing:
            last_name = max(differing, key=self._network_order)
            description = f"{descriptions[last_name]}; the gradients of all later parameters agree"
            verdict.backward = self._make_difference(last_name, verdict.gradients[last_name], description)
            verdict.further_gradients = len(differing) - 1

    def _compare_buffers(self, verdict: Verdict) -> None:
        """Find the first buffer that differs after the last step."""
        expected = self.reference.buffers()
        buffers = self.run.buffers()
        for name in sorted(expected, key=self._network_order):
            expected_buffer = expected[name][0]  # one process holds one copy
            largest = math.inf
            description = "a buffer is missing in this layout"
            if name in buffers:
                largest = max(relative_error(copy, expected_buffer) for copy in buffers[name])
                description = f"the buffer {name} differs by {largest:.1e} after the last step"
            if largest > self.tolerance:
                description += "; all-reduce its inputs over the replicas or model-parallel ranks"
                verdict.state = self._make_difference(name, largest, description)
                return

    def _compare_copies(self, verdict: Verdict) -> None:
        """Find the first parameter whose copies differ after the last step, if all else agrees."""
        unequal = sorted(self.run.unequal_weights(), key=self._network_order)
        if unequal and verdict.agrees:
            words = "the copies of this parameter were equal, but differ after the last step; all-reduce its gradient"
            verdict.state = self._make_difference(unequal[0], math.inf, f"{words} over the ranks that hold a copy")


def _largest_error(
    expected: Tensor, copies: Sequence[Tensor] | None, what: str, floor: float = 0.0
) -> tuple[float, str]:
    """Compare the ranks' copies [full] of a tensor with `expected` [full], the tensor of the run in one process.

    Returns (largest error, description of the error). what: name of the tensor in the description.
    """
    if not copies:
        return math.inf, f"{what} is missing in this layout"
    if any(copy.shape != expected.shape for copy in copies):
        joined = join_outputs(copies, expected)
        if joined is None:
            shapes = f"{list(expected.shape)} in one process but {_list_shapes(copies)} in this layout"
            return math.inf, f"{what} is {shapes}; declare how it is split"
        copies = joined
    errors = [relative_error(copy, expected, floor) for copy in copies]
    largest = max(errors)
    description = f"{what} differs by {largest:.1e}"
    if len(copies) > 1:
        description += f" on copy {errors.index(largest)} of {len(errors)}"
        spread = max(relative_error(copy, copies[0], floor) for copy in copies)
        # If all ranks make the same error, their copies differ by rounding errors only.
        if spread > largest / 100:
            description += ", and the copies differ from each other"
    return largest, description


def _list_shapes(parts: Sequence[Tensor]) -> str:
    return ", ".join(str(list(part.shape)) for part in parts)


def as_table(verdicts: Sequence[Verdict], tolerance: float) -> str:
    """Return a table with a row for each layout, followed by explanations of the differences."""
    rows = [["layout", "losses", "outputs", "gradients", ""]]
    explanations = [f"largest relative differences from the run in one process (tolerance: {tolerance:g})"]
    for v in verdicts:
        result = "DIFFERS"
        if v.agrees:
            result = "agrees"
        elif v.run_error:
            result = "DID NOT RUN"
        errors = []
        for error in (v.loss_error, v.forward_error, v.gradient_error):
            errors.append("-" if error is None else f"{error:.1e}")
        rows.append([v.layout, *errors, result])
        for explanation in explanations_of(v):
            explanations.append(f"{v.layout}: {explanation}")
    return "\n".join([align_columns(rows), *explanations])


def explanations_of(v: Verdict) -> Iterator[str]:
    """Yield sentences that say what differs and what the user should check."""
    if v.run_error:
        yield v.run_error
    if v.initial_values:
        yield f"initial values: {v.initial_values}"
    if v.forward:
        yield f"forward: the first layer that differs is {v.forward}"
    elif v.loss_differs_at == 1:
        yield (
            "forward: the loss differs, but no module's output does; check the loss function and other code that runs "
            "outside modules"
        )
    if v.backward:
        backward_text = f"backward: the last layer whose gradients differ is {v.backward}"
        if v.further_gradients:
            backward_text += f" ({v.further_gradients} earlier parameters differ as well)"
        if v.forward:
            backward_text += "; it may result from the forward difference"
        yield backward_text
    elif not v.forward and (v.loss_differs_at or 0) > 1:
        yield (
            f"step 1 agrees, but the loss of step {v.loss_differs_at} differs; check all-reduces over replicas, the "
            f"optimizer, and buffers or other state that the model changes in a step"
        )
    if v.state:
        yield f"state: {v.state}"
    for uncompared in v.not_compared:
        yield f"not compared: {uncompared}"
