"""Startup of the ranks: process group, parallel grid and random streams."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

import tds
from tds import messages

from .. import mpu
from .._torch import set_default_timeout, set_timeout_of_groups
from ..config import Config
from ..config.fields import ConfigError
from ..config.parallel import uses_sequence_parallel
from ..seeds import seed_generators
from . import device as device_module
from .agreement import require_equal_code, require_equal_values, settings_and_versions
from .errors import describe_rendezvous_error

WATCHDOG_MARGIN = 30.0  # seconds by which the timeout of collectives exceeds the limit of the watchdogs
# Numbers of processes: of most launchers, OpenMPI, MPICH and srun.
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
ADVISED_FLAGS = {  # error messages of `tds` advise these flags instead of the keys of a ds_config
    "overlap": "--no-overlap-grad-reduce",
    "no ZeRO": "--zero-stage 0",
    "no pipeline": "--pipe-parallel-size 0",
    "ranks": "--nproc-per-node, GPUS_PER_NODE=",
    "startup timeout": "--startup-timeout-minutes",
}


def world_size() -> int:
    """Return the number of ranks that the launcher has set in WORLD_SIZE; 1 without a launcher.

    Raises ConfigError for several ranks without the variable RANK, as each process would train alone.
    """
    for name in SIZES:
        ranks = os.environ.get(name, "1")
        if ranks != "1" and "RANK" not in os.environ:
            raise ConfigError(
                f"{name}={ranks} is in the environment, but RANK is not: set RANK, LOCAL_RANK and WORLD_SIZE for each "
                "process (under srun RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS), use a "
                f"launcher, or unset {name}"
            )
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize_megatron(config: Config) -> torch.device:
    """Join the other ranks, build the (pipe, data, model) grid and return this rank's device.

    Raises ConfigError if the grid does not fit the number of ranks, and RunError if the ranks were started with
    different settings or versions.
    """
    p = config.parallel
    p.data_parallel_size(world_size())  # raises ConfigError if the grid does not fit
    messages.setting_advice |= ADVISED_FLAGS  # errors of tds then name the flag to change
    device = _join_ranks(config)
    if dist.get_world_size() > 1:
        require_equal_values(settings_and_versions(config))
        require_equal_code()
    _load_kernels(config, device)
    seed_generators(config.train.seed)
    options = mpu.Options(
        sequence_parallel=uses_sequence_parallel(config, on_accelerator=device.type != "cpu"),
        overlap=p.async_tensor_model_parallel_allreduce,
        onednn=config.train.cpu_matmul == "onednn",
    )
    dropout_seed = mpu.derive_seed(config.train.seed, "dropout")
    mpu.initialize_model_parallel(
        p.model_parallel_size, p.stages, dropout_seed, options, p.context_parallel_size, p.expert_parallel_size
    )
    tds.use_rng_tracker(mpu.get_cuda_rng_tracker())  # so that recomputation repeats the dropout masks
    return device


def _join_ranks(config: Config) -> torch.device:
    """Join the other ranks and return this rank's device. Raises an error that the user can read if this fails."""
    if "RANK" not in os.environ:  # started without a launcher
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))  # the system chooses a free port for port 0
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("LOCAL_RANK", "0")  # a launcher that starts one rank per node may leave it out
    device = device_module.current_device()
    timeout = timedelta(minutes=config.parallel.startup_timeout_minutes)
    set_default_timeout(timeout)  # of all process groups that are created later
    if not dist.is_initialized():  # the calling program may have done this
        try:
            tds.init_distributed(device_module.default_backend(device), auto_mpi_discovery=False, timeout=timeout)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(describe_rendezvous_error(error)) from None
    if dist.get_world_size() != world_size():
        raise ConfigError(
            f"{dist.get_world_size()} ranks are running, but the launcher set WORLD_SIZE={world_size()}; "
            "start all ranks with the same launcher"
        )
    return device


def _load_kernels(config: Config, device: torch.device) -> None:
    """Load the chosen FlashAttention. Raises ValueError if the device or torch lacks a kernel of the settings."""
    train = config.train
    if train.precision == "fp8":
        problem = device_module.fp8_problem(device)
        if problem:
            raise ConfigError(f"--precision fp8: this {device.type} device cannot be used, as {problem}; use bf16")
    if train.cpu_matmul == "onednn" and not mpu.onednn_is_there():
        raise ConfigError("--cpu-matmul onednn: this build of torch has no oneDNN; use --cpu-matmul torch")
    if train.flash_attention_impl:
        device_module.use_flash_attention(train.flash_attention_impl, device)


def use_step_timeout(config: Config) -> None:
    """Switch the timeout of collectives from startup to training steps.

    The new timeout exceeds the time limits of the watchdogs, so that the watchdogs, whose reports say more, fire first.
    """
    parallel = config.parallel
    seconds = 60 * parallel.distributed_timeout_minutes
    if parallel.pipe_parallel_size:
        seconds = max(seconds, parallel.pipeline_timeout)
    timeout = timedelta(seconds=WATCHDOG_MARGIN + seconds)
    set_default_timeout(timeout)
    set_timeout_of_groups(timeout)
