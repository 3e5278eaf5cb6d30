"""Pretrain GPT-2. `bash scripts/run_gpt2.sh` calls this; `python pretrain_gpt2.py --help` lists every setting."""

from megatron.config.help import help_if_asked


def main() -> None:
    help_if_asked("gpt2")
    from megatron.tasks import GPT2
    from megatron.training import run

    run(GPT2())


if __name__ == "__main__":
    main()
