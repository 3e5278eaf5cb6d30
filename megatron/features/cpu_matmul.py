"""The flag --cpu-matmul auto: for each matmul of the model, the faster of two kernels on this CPU.

In fp32, the kernels are those of torch's BLAS and of oneDNN. Torch's builds come with MKL, whose best kernels are for
Intel CPUs only. On other CPUs, oneDNN may be faster or slower, by a factor that depends on the CPU and on the sizes.
In 16 bits, the kernels are torch's own and the one for fp32, whose result is rounded. Torch's own is slow on CPUs that
lack instructions for bf16. On CPUs with AMX tiles, the second kernel is torch's own on parts of the rows. The kernels
are measured when the model is built, with the sizes of its weights and the threads of the run. The measurements are
cached.
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
from torch import nn
from torch.nn import functional

from .. import mpu
from .._torch import emulates_matmul, has_amx_tiles, multiplies_in_parts, onednn_linear, onednn_pack
from ..atomic import private_temp_folder, write_text
from ..config import Config
from ..json_text import brief, is_list, read_json
from ..mpu.linear import MIN_ROWS, SecondKernelUse, matmul, transposed_matmul
from ..ranks.objects import gather_objects
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Plan

MIN_SPEEDUP = 1.1  # minimum speedup of the second kernel; below it, torch's own is used, as in any torch program
MIN_MULTIPLY_ADDS = 2**22  # multiply-adds below which a matmul takes no time worth a measurement
MAX_MULTIPLY_ADDS = 2**30  # multiply-adds of a measured matmul; a larger one is mostly measured on fewer rows
MAX_FEATURES = 4096  # rows and columns of a measured weight; a larger one is measured in part
ROUNDS = 5
MAX_ROUNDS = 15  # rounds after which a measurement is no longer repeated
UNCACHED_ELEMENTS = 2**25  # elements of fp32 weights that do not fit into the caches of a CPU
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKED = "fp32 with packed weights"  # is the precision in keys of the cache

Shape = tuple[int, int, int]  # rows of the input, and the weight's output and input features
Ratios = list[list[float]]  # for output, input gradient and weight gradient: speedups of the second kernel
NO_RATIOS: Ratios = [[], [], []]


class CpuMatmul(Feature):
    """Feature that chooses the kernels of linear layers on a CPU. A checkpoint stores the choice for its CPU."""

    _cpu = ""  # that of rank 0, if there is a choice

    def model(self, model: nn.Module, plan: Plan) -> None:
        self._products: dict[tuple[str, int, int], SecondKernelUse] = {}
        precision = plan.resolved.precision
        if not has_choice(plan.device, precision):
            return
        # All ranks take the name from rank 0, as machines may differ but the choice is the same on all ranks.
        self._cpu = gather_objects(describe_cpu())[0]
        shapes = measured_shapes(model, rows_per_matmul(plan.config))
        if not shapes:
            return
        ratios = measure_speedups(shapes, precision)
        # A SecondKernelUse has three bools: for the matmuls of the output and of both gradients. The sizes 0, 0 stand
        # for weights of all other sizes, about which the speedups of all measured sizes together decide.
        self._products[precision, 0, 0] = SecondKernelUse(*map(is_faster, join_ratios(ratios.values())))
        for (_, o, i), shape_ratios in ratios.items():  # o output and i input features
            self._products[precision, o, i] = SecondKernelUse(*map(is_faster, shape_ratios))
        self._apply_choice()
        if plan.config.log.log_details:
            print_rank_0(_note(ratios, precision))

    def state(self) -> dict[str, Any]:
        if not self._products:
            return {}
        rows = [[*key, *products] for key, products in self._products.items()]
        return {"cpu": self._cpu, "products": rows}

    def load(self, state: dict[str, Any]) -> None:
        rows: Any = state.get("products")
        if not is_list(rows, _is_row):
            raise ValueError(f"state.features.cpu_matmul.products must be a list of rows, not {brief(repr(rows))}")
        # On another CPU, the choice of the checkpoint may be slow, so the new choice stays.
        if state.get("cpu") != self._cpu:
            return
        for precision, o, i, *products in rows:
            self._products[precision, o, i] = SecondKernelUse(*products)
        self._apply_choice()

    def _apply_choice(self) -> None:
        chosen = mpu.get_options().second_kernel
        for (precision, o, i), products in self._products.items():
            chosen[DTYPES[precision], o, i] = products


def pack_weights(model: nn.Module, rows: int) -> None:
    """Pack weights of an fp32 model that is not trained, where this makes matmuls of `rows` tokens faster.

    A packed weight takes the place of the weight, except for an embedding, which look-ups still read. All ranks must
    call this.
    """
    if not has_choice(next(model.parameters()).device, "fp32"):
        return
    shapes = measured_shapes(model, rows)
    speedups = measure_speedups(shapes, PACKED)
    for module in model.modules():
        shape = (rows, *weight_sizes(module))
        if shape not in speedups or not is_faster(speedups[shape][0]):
            continue
        weight: Any = module.weight
        weight.packed = onednn_pack(weight.detach(), rows)
        if not isinstance(module, mpu.VocabParallelEmbedding):
            weight.data = weight.new_empty(0)


def has_choice(device: torch.device, precision: str) -> bool:
    """Return whether there are two kernels for matmuls of this precision on the device."""
    known = device.type == "cpu" and precision in DTYPES
    # In 16 bits, the second kernel is `half_linear`, which needs nothing that a build of torch may lack.
    return known and (precision != "fp32" or mpu.onednn_is_there())


def _is_row(row: Any) -> bool:
    """Return whether `row` is [precision, o, i, three bools]."""
    kinds = [str, int, int, bool, bool, bool]
    return isinstance(row, list) and [type(each) for each in row] == kinds and row[0] in DTYPES


def rows_per_matmul(config: Config) -> int:
    """Return the number of tokens that a linear layer multiplies at once."""
    length = config.data.seq_length
    if config.is_t5 and config.data.enc_seq_length:
        length = config.data.enc_seq_length
    return config.train.batch_size * length // config.parallel.context_parallel_size


def measured_shapes(model: nn.Module, rows: int) -> list[Shape]:
    """Return the sizes of the model's matmuls that are large enough to be measured: the same list on all ranks."""
    weights = {weight_sizes(module) for module in model.modules()}
    all_weights = set().union(*gather_objects(weights - {()}))  # () stands for modules without a weight
    # A matmul with fewer rows takes as long as with MIN_ROWS: the time to read the weight.
    counted_rows = max(rows, MIN_ROWS)
    return [(rows, o, i) for o, i in sorted(all_weights) if counted_rows * o * i >= MIN_MULTIPLY_ADDS]


def weight_sizes(module: nn.Module) -> tuple[int, ...]:
    """Return (output features, input features) of the weight that a module multiplies with; () if it has none."""
    if isinstance(module, mpu.ColumnParallelLinear):
        return module.output_size_per_partition, module.input_size
    if isinstance(module, mpu.RowParallelLinear):
        return module.output_size, module.input_size_per_partition
    if isinstance(module, mpu.VocabParallelEmbedding):
        return module.num_embeddings_per_partition, module.embedding_dim
    return ()


def measure_speedups(shapes: list[Shape], precision: str) -> dict[Shape, Ratios]:
    """Return the measured speedups for each shape, of all ranks together; all ranks must call this.

    What the cache of a rank lacks is measured by all ranks at the same time, as they also multiply at the same time.
    """
    path = cache_file()
    cached = read_cache(path)
    cpu = describe_cpu()
    cache_keys = {}
    missing = set()
    for shape in shapes:
        sizes = " x ".join(map(str, shape))
        key = f"{cpu}, {precision}, {sizes}"
        cache_keys[shape] = key
        if not is_conclusive(cached.get(key, NO_RATIOS)):
            missing.add(shape)
    all_missing = sorted(set().union(*gather_objects(missing)))
    for shape in all_missing:
        key = cache_keys[shape]
        # A cached measurement that is not conclusive gets further rounds.
        cached[key] = join_ratios([cached.get(key, NO_RATIOS), compare_kernels(shape, precision)])
    # One rank of each machine writes the file.
    if all_missing and os.environ.get("LOCAL_RANK", "0") == "0":
        write_cache(path, cached)
    rank_ratios = gather_objects([cached[key] for key in cache_keys.values()])
    # From one list per rank, with an entry for each shape, to one tuple per shape, with an entry for each rank.
    ratios_by_shape = zip(*rank_ratios, strict=True)
    return dict(zip(shapes, map(join_ratios, ratios_by_shape), strict=True))


def join_ratios(parts: Iterable[Ratios]) -> Ratios:
    """Return the speedups of all parts, for each of the three matmuls of a linear layer."""
    # Parts [[a], [b], [c]] and [[d], [e], [f]] give [[a, d], [b, e], [c, f]].
    return [list(chain(*product_parts)) for product_parts in zip(*parts, strict=True)]


def compare_kernels(shape: Shape, precision: str) -> Ratios:
    """Measure the speedups of the second kernel over torch's own for each matmul.

    The second kernel is oneDNN's in fp32, with packed weights for PACKED, and `half_linear` in 16 bits. Returns the
    speedups of all rounds for the output, the input gradient and the weight gradient of a linear layer.
    """
    rows, o, i = shape
    o = min(o, MAX_FEATURES)
    i = min(i, MAX_FEATURES)
    dtype = DTYPES.get(precision, torch.float32)
    # A bound of the rows bounds the time of the measurement. The speedup of parts of the rows depends on their number.
    bound = 32 * MAX_MULTIPLY_ADDS if multiplies_in_parts(dtype) else MAX_MULTIPLY_ADDS
    rows = min(rows, max(bound // (o * i), 64))  # at least 64, as a run never multiplies only a few
    if precision == PACKED:
        # Without training, there are no gradients. A speedup of 0 never chooses the second kernel.
        return [_packed_speedups(rows, o, i), [0.0], [0.0]]
    inputs = torch.ones(rows, i, dtype=dtype)
    weight = torch.ones(o, i, dtype=dtype)
    output_grad = torch.ones(rows, o, dtype=dtype)
    # Each call takes one more argument: True chooses the second kernel.
    products = (
        partial(matmul, inputs, weight, None),  # the output [rows, o]; None: without a bias
        partial(matmul, output_grad, weight.t(), None),  # the gradient of the input [rows, i]
        partial(transposed_matmul, output_grad, inputs),  # the gradient of the weight [o, i]
    )
    rounds = 1 if emulates_matmul(dtype) else ROUNDS  # an emulated matmul takes long, and is certainly slower
    return list(map(partial(_speedups, rounds=rounds), products))


def _packed_speedups(rows: int, o: int, i: int) -> list[float]:
    """Return the speedups of packed fp32 weights [o, i] over torch's own kernel."""
    inputs = torch.ones(rows, i)
    # With few rows, most of the time is spent reading weights from memory. So this measures more than caches can hold.
    elements = min(UNCACHED_ELEMENTS, MAX_MULTIPLY_ADDS // rows)
    weights = torch.ones(max(elements // (o * i), 1), o, i)
    packed_weights = [onednn_pack(weight, rows) for weight in weights]

    def multiply(use_packed: bool) -> None:
        for weight, packed_weight in zip(weights, packed_weights, strict=True):
            if use_packed:
                onednn_linear(inputs, packed_weight, None)
            else:
                functional.linear(inputs, weight)

    return _speedups(multiply)


def _speedups(product: Callable[[bool], object], rounds: int = ROUNDS) -> list[float]:
    """Return the speedup of the second kernel in each round."""
    for use_second in (True, False)[:rounds]:
        product(use_second)  # the first call may compile a kernel; an emulated one takes long
    speedups = []
    for _ in range(rounds):
        speedups.append(round(_seconds(product, False) / _seconds(product, True), 3))
    return speedups


def _seconds(product: Callable[[bool], object], use_second: bool) -> float:
    begin = time.perf_counter()
    product(use_second)
    return time.perf_counter() - begin


def is_faster(speedups: list[float]) -> bool:
    """Return whether the second kernel is worth its use: three of four rounds exceed MIN_SPEEDUP."""
    lower_quartile = sorted(speedups)[len(speedups) // 4]  # the value that a quarter of the rounds do not exceed
    return lower_quartile >= MIN_SPEEDUP


def is_conclusive(ratios: Ratios) -> bool:
    """Return whether the cached speedups of a shape need no further round: they agree, or there are enough."""
    return all(len(each) >= MAX_ROUNDS or _agree(each) for each in ratios)


def _agree(speedups: list[float]) -> bool:
    """Return whether the rounds agree on the better kernel: both quartiles are on the same side of MIN_SPEEDUP."""
    if not speedups:
        return False
    upper_quartile = sorted(speedups)[-1 - len(speedups) // 4]
    # `is_faster` says on which side of MIN_SPEEDUP the lower quartile is.
    return is_faster(speedups) == (upper_quartile >= MIN_SPEEDUP)


def _note(ratios: Mapping[Shape, Ratios], precision: str) -> str:
    """Return a line that says which kernels were chosen, and why."""
    products = list(chain(*ratios.values()))
    medians = list(map(statistics.median, products))
    chosen = list(map(is_faster, products))
    second = "oneDNN" if precision == "fp32" else "fp32 or in parts of their rows"
    return (
        f"note: {sum(chosen)} of {len(chosen)} matmuls of linear layers run in {second}, whose speed is "
        f"{min(medians):.2f} to {max(medians):.2f} of torch's own kernel on this CPU; --cpu-matmul torch turns this off"
    )


def read_cache(path: Path) -> dict[str, Ratios]:
    """Return the cached measurements; none if the file is missing or damaged, as the only cost is a new measurement."""
    with contextlib.suppress(OSError, ValueError):
        cached = read_json(path, dict)
        return {key: value for key, value in cached.items() if _are_ratios(value)}
    return {}


def _are_ratios(value: Any) -> bool:
    """Return whether an entry of the cache file, which may be damaged, is a list of three lists of numbers."""
    return is_list(value, lambda each: is_list(each, lambda ratio: type(ratio) is float), 3)


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
            folder = private_temp_folder("megatron-cache")
        except (ValueError, OSError):
            folder = Path(os.devnull)  # no folder is usable: cache reads and writes fail, so each run measures again
    return folder / "megatron-cpu-matmuls.json"


def describe_cpu() -> str:
    """Return the CPU, torch version and threads, since different machines may share the cache file."""
    name = "an unknown CPU"
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith("model name"):  # the same for each core
                name = line.partition(":")[2].strip()
                break
    capability = f"{torch.backends.cpu.get_cpu_capability()}{' with AMX' if has_amx_tiles() else ''}"
    return f"{name}, {capability}, torch {torch.__version__}, {torch.get_num_threads()} threads"
