"""Description of a cluster from data sheets: configs/clusters/*.json."""

import math
from dataclasses import dataclass, fields
from typing import Any

from megatron import presets
from megatron.config.command_line import read_json

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")  # dtypes of matmuls


@dataclass(frozen=True, kw_only=True)
class Link:
    """A device's link in one direction: bandwidth in gigabytes per second and latency in seconds."""

    gigabytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hardware figures of a cluster.

    kind: `cpu` or `accelerator`. The two differ in which activations a layer keeps for the backward pass.
    memory: memory of a device in gigabytes (10^9 bytes).
    peak_tflops: dense matmul peak by dtype. memory_bandwidth: gigabytes per second.
    inside: link of a device to other devices of its node. between: link of a device to other nodes.
    sources: references for the figures.
    sustained: fraction of `peak_tflops` that the device's power limit and kernels leave, relative to an A100.
    """

    name: str
    kind: str
    devices_per_node: int
    memory: float
    peak_tflops: dict[str, float]
    memory_bandwidth: float
    inside: Link
    between: Link
    sources: tuple[str, ...]
    sustained: float = 1.0

    @property
    def accelerated(self) -> bool:
        """True if the devices are accelerators."""
        return self.kind != "cpu"

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matmuls in `dtype`. Raises ValueError if the data sheet has none."""
        if dtype not in self.peak_tflops:
            raise ValueError(
                f"cluster {self.name} has no peak_tflops for {dtype}; use --precision {' or '.join(self.peak_tflops)}, "
                f"or add the figure to the cluster's file"
            )
        return self.peak_tflops[dtype] * 1e12

    def sustained_peak(self, dtype: str) -> float:
        """Return the FLOP/s of which `Efficiency` gives the fractions. Raises ValueError like `peak`."""
        return self.peak(dtype) * self.sustained

    def ranks_in_a_node(self, ranks: int, stride: int) -> int:
        """Return how many ranks of a group share a node. stride: distance between neighbours in the group."""
        # With 8 devices a node, 2 neighbours at a stride of 4 share a node; at a stride of 16, each has its own node.
        return min(ranks, max(1, self.devices_per_node // stride))

    def slowest_link(self, ranks: int, stride: int) -> Link:
        """Return the slowest link between two neighbours in a group of `ranks` devices that are `stride` apart."""
        # The first and the last device of the group are (ranks - 1) * stride devices apart.
        return self.inside if (ranks - 1) * stride < self.devices_per_node else self.between

    def ring(self, ranks: int, stride: int) -> Link:
        """Return a rank's link in the ring collectives of a group of `ranks` devices that are `stride` apart.

        In a group that spans nodes, rings run in parallel over the links of all its ranks in a node. Four ranks a node
        with 25 GB/s each reach 100 GB/s, if the links inside the node are at least as fast.
        """
        slowest = self.slowest_link(ranks, stride)
        if slowest is self.inside:
            return slowest
        combined_speed = self.ranks_in_a_node(ranks, stride) * self.between.gigabytes_per_second
        speed = min(self.inside.gigabytes_per_second, combined_speed)
        return Link(gigabytes_per_second=speed, latency_seconds=slowest.latency_seconds)


def load_cluster(name: str) -> Cluster:
    """Load a cluster from a JSON file or configs/clusters/NAME.json. Raises ValueError naming file and error."""
    path = presets.find_preset(name, "clusters")
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in presets.preset_folder("clusters").glob("*.json")))
        raise ValueError(
            f"there is no cluster {name}; use one of {names}, or a JSON file like configs/clusters/a100.json"
        )
    content = read_json(str(path))
    try:
        return _parse_cluster(content)
    except ValueError as error:
        raise ValueError(f"{path} is not a valid cluster: {error}; see configs/clusters/a100.json") from None


def _parse_cluster(content: Any) -> Cluster:
    """Return the cluster that a parsed JSON file describes. Raises ValueError, naming the error, if it is invalid."""
    # sustained is the only key that a file may omit. What is no object is refused below.
    if isinstance(content, dict):
        content = {"sustained": 1.0, **content}
    _check_keys(content, Cluster, "the file")
    if content["kind"] not in ("cpu", "accelerator"):
        raise ValueError(f"the key kind is {content['kind']!r}, not cpu or accelerator")
    if not isinstance(content["name"], str) or not isinstance(content["sources"], list):
        raise ValueError("the key name must be a string, and the key sources a list of strings")
    if type(content["devices_per_node"]) is not int:
        raise ValueError(f"devices_per_node is {content['devices_per_node']!r}, not a whole number")
    peaks = content["peak_tflops"]
    if not isinstance(peaks, dict) or not peaks or not set(peaks) <= set(DTYPES):
        raise ValueError(f"peak_tflops is {peaks!r}; it must have a number for at least one of {', '.join(DTYPES)}")
    for name in ("devices_per_node", "memory", "memory_bandwidth", "sustained"):
        _check_positive(name, content[name])
    for dtype, peak in peaks.items():
        _check_positive(f"peak_tflops.{dtype}", peak)
    links = {}
    for name in ("inside", "between"):
        link = content[name]
        _check_keys(link, Link, name)
        for figure, value in link.items():
            _check_positive(f"{name}.{figure}", value)
        links[name] = Link(**link)
    # Links and a tuple replace the objects and the list of the file.
    return Cluster(**{**content, **links, "sources": tuple(content["sources"])})


def _check_keys(content: Any, cls: type, what: str) -> None:
    """Raise ValueError unless `content` is a JSON object whose keys are the fields of the dataclass `cls`.

    what: name of the object in the error message.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{what} is not a JSON object")
    field_names = {field.name for field in fields(cls)}
    missing = sorted(field_names - set(content))
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    unknown = sorted(set(content) - field_names)
    if unknown:
        raise ValueError(f"{what} has unknown keys: {', '.join(unknown)}")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, not a positive number")
