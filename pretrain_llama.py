"""Pretrain Llama, Qwen or Mistral. `bash scripts/run_llama.sh` calls this; `python pretrain_llama.py --help` lists every setting."""

from megatron.tasks import Llama
from megatron.training import run


def main() -> None:
    run(Llama())


if __name__ == "__main__":
    main()
