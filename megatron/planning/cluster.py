"""The machines of a plan, as their data sheets describe them: configs/clusters/*.json."""

import json
from dataclasses import dataclass, fields
from typing import Any

from .. import presets


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a device's connection: gigabytes per second, and seconds until a message's first byte arrives."""

    gigabytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """kind: `cpu` or `accelerator`, which decides what layers keep. memory: of a device, in gigabytes of 10^9 bytes.

    peak_tflops: of dense matrix products, by dtype; memory_bandwidth: of a device's own memory, in gigabytes per second.
    inside, between: links of a device to others of its node, and to those of other nodes. sources: where the figures stand.
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

    @property
    def accelerated(self) -> bool:
        """Whether devices are no CPUs."""
        return self.kind != "cpu"

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`. Raises ValueError if the data sheet does not say."""
        if dtype not in self.peak_tflops:
            raise ValueError(
                f"the cluster {self.name} names no peak for {dtype}: use --precision {' or '.join(self.peak_tflops)}, or add it "
                f"to peak_tflops of its file"
            )
        return self.peak_tflops[dtype] * 1e12

    def link(self, ranks: int, stride: int) -> Link:
        """What a group of `ranks` devices, each `stride` after the one before, goes over: the slower link as soon as it leaves a node."""
        return self.inside if (ranks - 1) * stride < self.devices_per_node else self.between


def load_cluster(name: str) -> Cluster:
    """The cluster of a JSON file, or of configs/clusters/NAME.json. Raises ValueError that names the file and what is wrong."""
    path = presets.find(name, "clusters")
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in presets.folder("clusters").glob("*.json")))
        raise ValueError(
            f"there is no cluster {name}: give one of {known}, or a JSON file like configs/clusters/a100.json"
        )
    try:
        return _cluster(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a cluster: {error}; configs/clusters/a100.json does") from None


def _cluster(found: dict[str, Any]) -> Cluster:
    names = {f.name for f in fields(Cluster)}
    if strange := set(found) ^ names:
        raise KeyError(f"{', '.join(sorted(strange))} stand in one of the file and the description only")
    if found["kind"] not in ("cpu", "accelerator"):
        raise KeyError(f"kind is {found['kind']!r}, not cpu or accelerator")
    for name in ("inside", "between"):
        found[name] = Link(**found[name])
    for name in ("devices_per_node", "memory", "memory_bandwidth"):
        if not isinstance(found[name], (int, float)) or found[name] <= 0:
            raise KeyError(f"{name} is {found[name]!r}, not a positive number")
    return Cluster(**{**found, "sources": tuple(found["sources"])})
