"""Speed of two hosts with a delayed link between them, compared with the contenders of parallel.py.

    python benchmarks/latency.py
    python benchmarks/latency.py --kinds dp --delays 5 --mbit 100

The hosts are two namespaces of this machine with one rank each (tests/hosts), which needs root and Linux. A delay is
that of one direction in milliseconds. All contenders make their steps in turn, several steps in each turn, since the
end of a turn waits for both hosts.
"""

import sys

from _alternate import ROOT, new_parser

from tests.hosts.lab import Lab, lab, lacking

SIZES = "--layers 2 --hidden 128 --seq 128 --vocab 500 --batch 4"
PORT = 29500


def measure(net: Lab, kind: str, rounds: int, steps: int, port: int) -> str:
    """Return the table that parallel.py prints for one kind on two hosts."""
    words = f"--kind {kind} {SIZES} --rounds {rounds} --steps {steps}".split()
    started = []
    for rank, host in enumerate(net.hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": net.hosts[0].name, "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        started.append(host.start("python", str(ROOT / "benchmarks" / "parallel.py"), *words, env=env))
    first, second = [each.communicate()[0] for each in started]
    if any(each.returncode for each in started):
        raise RuntimeError(first + second)
    return "\n".join(line for line in first.splitlines() if line.startswith("|"))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=("dp", "pp", "tp"), default=["dp", "pp"])
    parser.add_argument("--delays", nargs="+", type=float, default=[0.0, 5.0, 50.0], help="milliseconds one way")
    parser.add_argument("--mbit", type=float, default=0.0, help="megabits a second of each host; 0 for no limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps in each turn of a contender")
    args = parser.parse_args()
    if lacking():
        sys.exit(lacking())
    with lab(2) as net:
        port = PORT
        for kind in args.kinds:
            for delay in args.delays:
                net.link(*net.hosts, delay=delay / 1000, rate=args.mbit * 1e6 / 8)
                print(f"\n{kind}, {delay:g} ms\n", flush=True)
                print(measure(net, kind, args.rounds, args.steps, port), flush=True)
                port += 1


if __name__ == "__main__":
    main()
