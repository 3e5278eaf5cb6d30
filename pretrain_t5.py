"""Pretrain T5.

`bash scripts/run_t5.sh` calls this script; `python pretrain_t5.py --help all` lists every setting.
"""

from megatron.config.check import parse_early


def main() -> None:
    config = parse_early("t5")
    from megatron.tasks import T5
    from megatron.training import run

    run(T5(), config=config)


if __name__ == "__main__":
    main()
