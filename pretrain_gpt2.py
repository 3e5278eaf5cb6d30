"""Pretrain GPT-2. `bash scripts/run_gpt2.sh` calls this; `python pretrain_gpt2.py --help` lists every setting."""

from megatron.tasks import GPT2
from megatron.training import run


def main() -> None:
    run(GPT2())


if __name__ == "__main__":
    main()
