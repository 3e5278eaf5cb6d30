"""From settings to running ranks: process group, grid, random streams."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

import tds
from tds import advice

from .. import mpu
from .._torch import set_default_timeout, set_timeout_of_groups
from ..config import Config
from ..config.fields import ConfigError
from . import device as device_module
from .agreement import same_everywhere, settings_and_versions
from .cpu_matmul import by_onednn

AFTER_THE_WATCHDOG = 30.0  # seconds
FLAGS = {
    "overlap": "--no-overlap-grad-reduce",
    "no ZeRO": "--zero-stage 0",
    "no pipeline": "--pipe-parallel-size 0",
    "ranks": "--nproc-per-node, GPUS_PER_NODE=",
}


def world_size() -> int:
    """Ranks of this run as the launcher announced them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here(world: int) -> int | None:
    """Ranks on this machine, as torchrun or DeepSpeed's launcher says it; None where nobody does. world: ranks in all."""
    known = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(known) if known else 1 if world == 1 else None


def initialize_megatron(config: Config) -> torch.device:
    """Join the other ranks and build the (pipe, data, model) grid. Returns this rank's device.

    Raises ConfigError if the grid does not fit the number of ranks, and RunError if ranks were started with different settings
    or versions.
    """
    config.parallel.data_parallel_size(world_size())
    advice.ways |= FLAGS
    if "RANK" not in os.environ:
        # One process started by hand: it is its own world.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    os.environ.setdefault("LOCAL_RANK", "0")
    device = device_module.current()
    timeout = timedelta(minutes=config.parallel.startup_timeout_minutes)
    set_default_timeout(timeout)
    if not dist.is_initialized():
        try:
            tds.init_distributed(device_module.backend(device), auto_mpi_discovery=False, timeout=timeout)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(not_met(error)) from None
    if dist.get_world_size() != world_size():
        raise ConfigError(f"{dist.get_world_size()} ranks are running, the launcher announced {world_size()}")
    same_everywhere(settings_and_versions(config))
    torch.manual_seed(config.train.seed)
    p, seed = config.parallel, mpu.derive_seed(config.train.seed, "dropout")
    onednn = by_onednn(config.train.cpu_matmul, device)
    options = mpu.Options(
        sequence_parallel=config.splits_sequences(device.type != "cpu"),
        overlap=p.async_tensor_model_parallel_allreduce,
        onednn=onednn,
    )
    mpu.initialize_model_parallel(p.model_parallel_size, p.stages, seed, options, p.context_parallel_size)
    return device


def steps_begin(config: Config) -> None:
    """From now on ranks wait for each other as long as a step may take; a watchdog, which knows more to say, comes first."""
    p = config.parallel
    seconds = 60 * p.distributed_timeout_minutes
    timeout = timedelta(seconds=AFTER_THE_WATCHDOG + max(seconds, p.pipeline_timeout if p.pipe_parallel_size else 0))
    set_default_timeout(timeout)
    set_timeout_of_groups(timeout)


def not_met(error: Exception) -> str:
    """Why the ranks did not find each other, in a sentence."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    text = " ".join(str(error).split())
    if "EADDRINUSE" in text:
        return f"port {os.environ.get('MASTER_PORT')} is in use by another process: give another one (MASTER_PORT)"
    if "waiting for clients" in text or "timed out" in text.lower():
        return (
            f"the {os.environ.get('WORLD_SIZE')} ranks did not all meet at {where} ({text[:120]}): start the missing ones, with "
            f"the same MASTER_ADDR and MASTER_PORT (--startup-timeout-minutes says how long to wait)"
        )
    return f"the ranks could not meet at {where}: {text[:200]}"
