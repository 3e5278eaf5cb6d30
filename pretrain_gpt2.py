"""Pretrain GPT-2.

`bash scripts/run_gpt2.sh` calls this script; `python pretrain_gpt2.py --help all` lists every setting.
"""

from megatron.config.check import parse_early


def main() -> None:
    config = parse_early("gpt2")
    from megatron.tasks import GPT2
    from megatron.training import run

    run(GPT2(), config=config)


if __name__ == "__main__":
    main()
