"""The flag --cpu-matmul auto: for each matmul of the model, the faster of two kernels on this CPU.

In fp32, the kernels are those of torch's BLAS and of oneDNN. Torch's builds come with MKL, whose best kernels are for
Intel CPUs only. On other CPUs, oneDNN may be faster or slower, by a factor that depends on the CPU and on the sizes.
In 16 bits, the kernels are torch's own and the one for fp32, whose result is rounded. Torch's own is slow on CPUs that
lack instructions for bf16. The kernels are measured when the model is built, with the sizes of its weights and the
threads of the run. The measurements are cached.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import mpu
from ..atomic import own_folder, write_text
from ..config import Config
from ..json_text import brief, read_json
from ..mpu.linear import Products, matmul, transposed_matmul
from ..ranks.objects import gather_objects
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Plan

WORTH = 1.1  # minimum speedup of the second kernel; below it, torch's own is used, as in any torch program
FEWEST = 2**22  # multiply-adds below which a matmul takes no time worth a measurement
MOST = 2**30  # multiply-adds of a measured matmul; a larger one is measured on fewer rows
LONGEST = 4096  # rows and columns of a measured weight; a larger one is measured in part
ROUNDS = 5
ENOUGH = 15  # rounds after which a measurement is no longer repeated
CLEAR = 4.0  # a speedup that one round suffices for
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Shape = tuple[int, int, int]  # rows of the input, and the weight's output and input features
Ratios = list[list[float]]  # for output, input gradient and weight gradient: speedups of the second kernel
NOTHING: Ratios = [[], [], []]


class CpuMatmul(Feature):
    """Feature that chooses the kernels of linear layers on a CPU. A checkpoint stores the choice for its CPU."""

    _cpu = ""  # that of rank 0, if there is a choice

    def model(self, model: nn.Module, plan: Plan) -> None:
        self._products: dict[tuple[str, int, int], Products] = {}
        precision = plan.resolved.precision
        if not has_choice(plan.device, precision):
            return
        self._cpu = gather_objects(this_cpu())[0]
        shapes = measured_shapes(model, rows_of(plan.config))
        if not shapes:
            return
        ratios = measured(shapes, precision)
        self._products[precision, 0, 0] = Products(*map(is_faster, joined(ratios.values())))
        for (_, o, i), found in ratios.items():
            self._products[precision, o, i] = Products(*map(is_faster, found))
        self._use()
        if plan.config.log.log_details:
            print_rank_0(_note(ratios, precision))

    def state(self) -> dict[str, Any]:
        if not self._products:
            return {}
        rows = [[*key, *products] for key, products in self._products.items()]
        return {"cpu": self._cpu, "products": rows}

    def load(self, state: dict[str, Any]) -> None:
        rows = state.get("products")
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise ValueError(f"state.features.cpu_matmul.products must be a list of rows, not {brief(repr(rows))}")
        if state.get("cpu") != self._cpu:
            return
        for precision, o, i, *products in rows:
            self._products[precision, o, i] = Products(*products)
        self._use()

    def _use(self) -> None:
        chosen = mpu.get_options().products
        for (precision, o, i), products in self._products.items():
            chosen[DTYPES[precision], o, i] = products


def has_choice(device: torch.device, precision: str) -> bool:
    """Return whether there are two kernels for matmuls of this precision on the device."""
    known = device.type == "cpu" and precision in DTYPES
    return known and (precision != "fp32" or mpu.onednn_is_there())


def _is_row(row: Any) -> bool:
    """Return whether `row` is [precision, o, i, three bools]."""
    kinds = [str, int, int, bool, bool, bool]
    return isinstance(row, list) and [type(each) for each in row] == kinds and row[0] in DTYPES


def rows_of(config: Config) -> int:
    """Return the number of tokens that a linear layer multiplies at once."""
    length = config.data.seq_length
    if config.is_t5 and config.data.enc_seq_length:
        length = config.data.enc_seq_length
    return config.train.batch_size * length // config.parallel.context_parallel_size


def measured_shapes(model: nn.Module, rows: int) -> list[Shape]:
    """Return the sizes of the model's matmuls on all ranks that are large enough to be measured, in one order."""
    weights = set()
    for module in model.modules():
        if isinstance(module, mpu.ColumnParallelLinear):
            weights.add((module.output_size_per_partition, module.input_size))
        elif isinstance(module, mpu.RowParallelLinear):
            weights.add((module.output_size, module.input_size_per_partition))
        elif isinstance(module, mpu.VocabParallelEmbedding):
            weights.add((module.num_embeddings_per_partition, module.embedding_dim))
    everywhere = set().union(*gather_objects(weights))
    return [(rows, o, i) for o, i in sorted(everywhere) if rows * o * i >= FEWEST]


def measured(shapes: list[Shape], precision: str) -> dict[Shape, Ratios]:
    """Return the measured speedups for each shape, of all ranks together; all ranks must call this.

    What the cache of a rank lacks is measured by all ranks at the same time, as they also multiply at the same time.
    """
    path = cache_file()
    known = read_cache(path)
    cpu = this_cpu()
    keys = {shape: f"{cpu}, {precision}, {' x '.join(map(str, shape))}" for shape in shapes}
    missing = {shape for shape, key in keys.items() if not is_settled(known.get(key))}
    everywhere = sorted(set().union(*gather_objects(missing)))
    for shape in everywhere:
        new = compare_kernels(shape, DTYPES[precision])
        before = known.get(keys[shape], NOTHING)
        known[keys[shape]] = joined([before, new])
    if everywhere and os.environ.get("LOCAL_RANK", "0") == "0":
        write_cache(path, known)
    of_ranks = gather_objects([known[key] for key in keys.values()])
    of_shapes = zip(*of_ranks, strict=True)
    return {shape: joined(found) for shape, found in zip(shapes, of_shapes, strict=True)}


def joined(parts: Iterable[Ratios]) -> Ratios:
    """Return the speedups of all parts, for each of the three matmuls of a linear layer."""
    return [list(chain(*of_product)) for of_product in zip(*parts, strict=True)]


def compare_kernels(shape: Shape, dtype: torch.dtype) -> Ratios:
    """Measure the speedups of the second kernel for the matmuls of a linear layer, in up to ROUNDS rounds each."""
    rows, o, i = shape
    o = min(o, LONGEST)
    i = min(i, LONGEST)
    rows = min(rows, max(MOST // (o * i), 64))
    x = torch.ones(rows, i, dtype=dtype)
    weight = torch.ones(o, i, dtype=dtype)
    grad = torch.ones(rows, o, dtype=dtype)
    products = (
        partial(matmul, x, weight, None),
        partial(matmul, grad, weight.t(), None),
        partial(transposed_matmul, grad, x),
    )
    return [_speedups(product) for product in products]


def _speedups(product: Callable[[bool], Tensor]) -> list[float]:
    _seconds(product, True)
    found: list[float] = []
    while len(found) < ROUNDS and max(found, default=0.0) < CLEAR:
        found.append(round(_seconds(product, False) / _seconds(product, True), 3))
    return found


def _seconds(product: Callable[[bool], Tensor], second: bool) -> float:
    begin = time.perf_counter()
    product(second)
    return time.perf_counter() - begin


def is_faster(speedups: list[float]) -> bool:
    """Return whether the second kernel is worth its use: three of four rounds exceed WORTH."""
    return quarter(speedups) >= WORTH


def quarter(values: list[float]) -> float:
    """Return the value that a quarter of the values do not exceed."""
    return sorted(values)[len(values) // 4]


def is_settled(ratios: Any) -> bool:
    """Return whether the cached speedups of a shape need no further round: they agree, or there are enough."""
    if not isinstance(ratios, list) or len(ratios) != 3:
        return False
    return all(len(each) >= ENOUGH or _agree(each) for each in ratios)


def _agree(speedups: list[float]) -> bool:
    if not speedups:
        return False
    upper = sorted(speedups)[-1 - len(speedups) // 4]
    return max(speedups) >= CLEAR or (quarter(speedups) >= WORTH) == (upper >= WORTH)


def _note(ratios: Mapping[Shape, Ratios], precision: str) -> str:
    """Return a line that says which kernels were chosen, and why."""
    products = list(chain(*ratios.values()))
    medians = list(map(statistics.median, products))
    chosen = list(map(is_faster, products))
    second = "oneDNN" if precision == "fp32" else "fp32 with rounded results"
    return (
        f"note: {sum(chosen)} of {len(chosen)} matmuls of linear layers run in {second}, whose speed is "
        f"{min(medians):.2f} to {max(medians):.2f} of torch's own kernel on this CPU; --cpu-matmul torch turns this off"
    )


def read_cache(path: Path) -> dict[str, Ratios]:
    """Return the cached measurements; none if the file is missing or damaged, as the only cost is a new measurement."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if _are_ratios(value)}
    return {}


def _are_ratios(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(isinstance(each, list) and all(type(ratio) is float for ratio in each) for each in value)


def write_cache(path: Path, known: Mapping[str, Ratios]) -> None:
    """Write the measurements, unless the file cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(known, indent=1))


def cache_file() -> Path:
    """Return the path of the cache file: in the user's cache folder or, without a home directory, a temporary one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        try:
            folder = own_folder("megatron-cache")
        except ValueError:
            folder = Path(os.devnull)  # no folder is usable: cache reads and writes fail, so each run measures again
    return folder / "megatron-cpu-matmul.json"


def this_cpu() -> str:
    """Return the CPU, torch version and threads, since different machines may share the cache file."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(iter(models), "an unknown CPU")
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {capability}, torch {torch.__version__}, {torch.get_num_threads()} threads"
