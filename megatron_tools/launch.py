"""Start the ranks of a run like torchrun, with short error messages.

The ranks run on this machine, or on this node of several. Takes torchrun's
arguments, then the script and its arguments. The ranks report errors
themselves; the exit code is the code of the first rank that failed.

SIGTERM, Ctrl-C   the ranks save and exit within --shutdown-timeout seconds
                  (default: the variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else
                  600); a second signal kills them at once; the exit code is
                  128 + the signal's number
SIGUSR1           the ranks save and continue
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from megatron.streams import open_closed_streams
from tds.parent_death import pid_namespace

EXAMPLES = """\
examples:
  python tools/launch.py --standalone --nproc-per-node 2 pretrain_gpt2.py \\
      --pipe-parallel-size 2 --data-path ...
  python tools/launch.py --nnodes 2 --node-rank 0 --master-addr node1 \\
      --master-port 6000 --nproc-per-node 8 pretrain_gpt2.py ..."""
SHUTDOWN_SECONDS = 600
DEFAULT_PORT = 29500  # torchrun uses the same port
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SIGNAL_CAUSES = {
    int(signal.SIGBUS): "a file that it has mapped, such as a corpus, has become shorter, or /dev/shm is full",
    int(signal.SIGKILL): "the machine may have run out of memory (see dmesg)",
}
REFUSED_EXIT_CODE = 2  # exit code for bad arguments, both of argparse and of this project's scripts
# Advice for errors that do not name the flag.
CHECK_NUMBERS = " (check the numbers of the launcher's arguments and TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"


def print_message(words: str) -> None:
    """Write a line to stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"launch.py: {words}\n".encode())  # os.write is safe in signal handlers


class Signals:
    """Signal handling of the launcher: forward a stop request to the ranks and wait for them.

    torch's own handler raises an exception in the middle of whatever the launcher does, and kills whole process groups,
    including data workers. It waits for 30 seconds only, which is too short for saving a large model.
    """

    def __init__(self, seconds: float) -> None:
        self.shutdown_seconds = seconds
        self.stop_signal = 0  # number of the signal that asked the launcher to stop, 0 before
        self._stop_time = 0.0
        self._process_group: Any = None  # torch's group of rank processes since the last (re)start, None before

    def prepare_start(self, group: Any) -> None:
        """Prepare for the start of `group`'s processes, to which `install_handlers` will forward signals.

        From now until the call of `install_handlers`, the launcher ignores SIGUSR1, and the new processes inherit
        this. Otherwise SIGUSR1 would kill a process that is still importing modules and has no handler yet.
        Raises SystemExit if a signal has already asked the launcher to stop.
        """
        if self.stop_signal:
            raise SystemExit(128 + self.stop_signal)
        self._process_group = group
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def install_handlers(self) -> None:
        """Install the launcher's signal handlers. Called after the rank processes have started."""
        signal.signal(signal.SIGUSR1, lambda *_: self._send_to_ranks(os.kill, signal.SIGUSR1))
        for number in STOP_SIGNALS:
            # Keep ignoring a signal that was ignored before the launch, such as SIGHUP under nohup.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._request_stop)

    def _send_to_ranks(self, send: Callable[[int, int], None], number: int) -> None:
        if self._process_group is not None:
            for pid in self._process_group.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    send(pid, number)

    def _request_stop(self, number: int, _: FrameType | None) -> None:
        """Ask the ranks to save and exit; kill them if the signal comes again or the time is up."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.stop_signal:
            # A second signal within half a second is the same request, delivered twice.
            if time.monotonic() - self._stop_time < 0.5:
                return
            print_message(f"{name} again: killing the ranks")
            self._kill_ranks(128 + number)  # ends this process, too
        self.stop_signal = number
        self._stop_time = time.monotonic()
        print_message(
            f"{name}: the ranks have {self.shutdown_seconds:g} s to save and exit (--shutdown-timeout); "
            f"send it again to kill them at once"
        )
        self._send_to_ranks(os.kill, signal.SIGTERM)
        timer = threading.Timer(self.shutdown_seconds, self._kill_after_timeout)
        timer.daemon = True
        timer.start()

    def _kill_after_timeout(self) -> None:
        print_message(f"the ranks did not exit within {self.shutdown_seconds:g} s (--shutdown-timeout): killing them")
        self._kill_ranks(128 + self.stop_signal)

    def _kill_ranks(self, code: int) -> None:
        self._send_to_ranks(os.killpg, signal.SIGKILL)  # torch puts each rank into its own process group
        os._exit(code)


def install_signals(args: Any) -> Signals:
    """Replace torch's signal handling with that of the class Signals."""
    from megatron import _torch

    seconds: Any = getattr(args, "shutdown_timeout", None)  # torch 2.11 has no flag --shutdown-timeout
    if seconds is None:
        seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    signals = Signals(float(seconds))

    def start(group: Any, start_with_torch: Callable[[Any], None]) -> None:
        torch_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        signals.prepare_start(group)
        start_with_torch(group)
        # torch has replaced the handlers of these signals. Undo this, so that install_handlers sees the original ones.
        for number, handler in torch_handlers.items():
            signal.signal(number, handler)
        signals.install_handlers()

    _torch.replace_elastic_start(start)
    return signals


def _rendezvous_address(args: Any) -> str:
    """Return where the nodes meet, as host:port."""
    return str(args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or DEFAULT_PORT}")


def _spans_nodes(args: Any) -> bool:
    """Return whether the run spans more nodes than this one."""
    return str(args.nnodes) not in ("1", "1:1")  # MIN:MAX, as torchrun accepts it


def check_numbers(args: Any) -> None:
    """Raise ValueError or AssertionError for a number of nodes, ranks or restarts, or a port, that cannot be used."""
    from torch.distributed.run import config_from_args

    # torch raises errors for words that it cannot parse. Of --nnodes 2:4, max_nodes is 4; of --nproc-per-node gpu,
    # nproc_per_node is the number of GPUs.
    config: Any = config_from_args(args)[0]  # type: ignore[no-untyped-call]
    if config.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node {args.nproc_per_node} must be at least 1")
    # Only the static rendezvous uses --node-rank and --master-port.
    if args.standalone or args.rdzv_backend != "static":
        return
    if not 0 <= args.node_rank < config.max_nodes:
        raise ValueError(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}: nodes are counted from 0")
    port = args.master_port
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"--master-port {port} must lie between 1 and 65535; --standalone finds a free port")


def prepare_rendezvous(args: Any) -> None:
    """Prepare for the rendezvous with the other nodes, and print that this node waits for them.

    Sets the timeout of the rendezvous to --startup-timeout-minutes, and lets Ctrl-C end it at once.
    """
    setting = {"static": "timeout", "c10d": "join_timeout"}.get(args.rdzv_backend)
    if not _spans_nodes(args) or setting is None:
        return
    # --rdzv-conf is a list such as `timeout=900,is_host=1`, and empty by default.
    # The comma in front keeps join_timeout=, which is another setting, from counting as timeout=.
    if f",{setting}=" not in f",{args.rdzv_conf}":
        timeout = f"{setting}={_startup_timeout(args.training_script_args)}"
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, timeout]))
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Python's own handler of Ctrl-C would only run after torch's socket has timed out.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    address = _rendezvous_address(args)
    print_message(f"node {args.node_rank} of {args.nnodes} waits for the other nodes at {address}")
    host = address.rpartition(":")[0].strip("[]")  # an IPv6 address is written as [fd00::1]:29500
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # not fatal: the host name of a container may not resolve until that container runs
        flag = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr (MASTER_ADDR=)"
        print_message(f"the host {host} does not resolve on this machine yet; check {flag}")


def _startup_timeout(arguments: Sequence[str]) -> int:
    """Return --startup-timeout-minutes of a training command, or of its --config files, in seconds.

    The default replaces an invalid value, which the ranks will refuse.
    """
    from megatron.config import ParallelConfig
    from megatron.config.command_line import values_of_files
    from megatron.config.flags import read_flags

    name = "startup_timeout_minutes"
    default = ParallelConfig.startup_timeout_minutes
    # An invalid value, or a file that cannot be read, raises one of these errors.
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        flags = read_flags(arguments)
        values = values_of_files(flags.files) | flags.settings  # flags override the files of --config
        return max(int(float(values.get(name, default)) * 60), 1)
    return int(default * 60)


def describe_rendezvous_error(error: Exception, args: Any) -> str:
    """Return one sentence that explains why the rendezvous failed."""
    text = " ".join(str(error).split())
    address = _rendezvous_address(args)
    if "EADDRINUSE" in text:
        advice = "set another port in --rdzv-endpoint if it is given, else another --master-port (MASTER_PORT=)"
        if _spans_nodes(args):
            advice += ", or check that no other node has --node-rank 0 (NODE_RANK=)"
        port = address.rpartition(":")[2]
        return f"port {port} of this machine is in use by another process; {advice}"
    return (
        f"node {args.node_rank} of {args.nnodes} did not reach the other nodes at {address} ({text[:150]}); start the "
        "missing nodes with the same --master-addr and --master-port, or --rdzv-endpoint"
    )


def describe_signal(number: int) -> str:
    """Return the name of a signal that killed a rank, with its usual cause."""
    names = {int(each): each.name for each in signal.Signals}
    words = f"signal {number} ({names.get(number, 'unknown')})"
    if number in SIGNAL_CAUSES:
        words += f": {SIGNAL_CAUSES[number]}"
    return words


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{EXAMPLES}")
        return 0
    open_closed_streams()
    # Ranks share this machine's cores, so each gets one thread unless the user sets another number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ranks use huge pages if the kernel allows it on request. glibc reads this variable when a process starts.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide C++ stack traces, which clutter the ranks' messages
    # By this variable, the ranks know which process is the launcher. They exit when it has ended. Without a name of its
    # namespace, they look for the end of their parent instead.
    namespace = pid_namespace()
    if namespace:
        os.environ["TDS_LAUNCHER"] = f"{os.getpid()} {namespace}"
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before the ranks start, there is nothing to save
    warnings.simplefilter("ignore")
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    from megatron import _torch

    for name in ["torch.distributed", *logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    args = parse_args(argv)  # type: ignore[no-untyped-call]
    if args.standalone and not args.local_addr:
        args.local_addr = "127.0.0.1"  # torch would wait for ever if the machine's own name does not resolve
    try:
        check_numbers(args)
        signals = install_signals(args)
    except (ValueError, AssertionError, OSError) as error:
        names_flag = "--" in str(error)  # unlike an error of torch or float()
        print_message(f"{error}{'' if names_flag else CHECK_NUMBERS}")
        return REFUSED_EXIT_CODE
    # Ranks that exit with this code have rejected their arguments, and would do so again after a restart.
    _torch.never_restart_after(REFUSED_EXIT_CODE)
    _torch.ignore_ended_ranks()
    prepare_rendezvous(args)
    try:
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        if signals.stop_signal:
            return 128 + signals.stop_signal
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:  # torch reports a rank that a signal has killed as minus the signal's number
            print_message(f"rank {rank} was killed by {describe_signal(-code)}")
        return code if code > 0 else 1
    except (DistError, RendezvousError) as error:
        print_message(describe_rendezvous_error(error, args))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 128 + signals.stop_signal if signals.stop_signal else 0


def cli() -> None:
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    cli()
