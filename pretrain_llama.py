"""Pretrain Llama, Qwen or Mistral.

`bash scripts/run_llama.sh` calls this script; `python pretrain_llama.py --help all` lists every setting.
"""

from megatron.config.check import parse_early


def main() -> None:
    config = parse_early("llama")
    from megatron.tasks import Llama
    from megatron.training import run

    run(Llama(), config=config)


if __name__ == "__main__":
    main()
