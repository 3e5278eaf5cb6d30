"""Pretrain GPT-2.

`bash scripts/run_gpt2.sh` calls this script; `python pretrain_gpt2.py --help all` lists every setting.
"""

from megatron.config.check import parse_early


def main() -> None:
    """Train a GPT-2 with the settings of the command line."""
    config = parse_early("gpt2")  # before torch is imported, so that invalid flags are reported without delay
    from megatron.tasks import GPT2
    from megatron.training import run

    run(GPT2(), config=config)


if __name__ == "__main__":
    main()
