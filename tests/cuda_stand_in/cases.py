"""The cases: model family x layout x flags, the waits that a training step may have, and the tolerance of losses."""

from dataclasses import dataclass

# In fp32, losses equal the CPU's. A flag that comes later in a command overrides an earlier one.
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --batch-size 2 --gas 2 --lr 3e-3 "
    "--train-iters 4 --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --precision fp32 "
    "--hidden-dropout 0 --attention-dropout 0 --no-compile --cpu-matmul torch --no-tensorboard --no-save-at-end"
)
T5 = "--enc-seq-length 32 --dec-seq-length 16"
EXPERTS = "--num-experts 4 --experts-per-token 2"
PIPE = "--pipe-parallel-size 2"
TENSOR = "--model-parallel-size 2 --sequence-parallel"
GENERATE = "tools/generate.py --load {run} --prompt The --max-new-tokens 8 --temperature 0"
EVALUATE = "tools/evaluate.py --load {run} --input {text} --window 32"
PRINTED = 5e-5  # losses are printed with 4 decimals
# bf16 rounds to 8 bits: results of other kernels, such as another attention, differ in the last of them.
BF16 = 5e-3
# Of DeepSpeed 0.19.8: its optimizers read the overflow flag and copy numbers for the norm of the gradients
# (runtime/zero/stage_1_and_2.py, stage3.py, runtime/utils.py).
DEEPSPEED = 7


@dataclass(frozen=True)
class Case:
    """A training run, and commands that follow.

    ranks: number of ranks. flags: flags after `BASE`.
    waits: the most waits for the device in a training step. deepspeed_waits: the most in DeepSpeed's own code.
    tolerance: the largest difference between a loss and the CPU's.
    then: further commands, each of which begins with a tool, or with flags that follow the run's own (a resume).
    timeout: seconds for each command.
    """

    family: str
    ranks: int
    flags: str = ""
    waits: int = 0
    deepspeed_waits: int = 0
    tolerance: float = PRINTED
    then: tuple[str, ...] = ()
    timeout: float = 180.0

    def command(self, data: str, tokenizer: str, run: str) -> list[str]:
        """Return the command of the run for worker.py."""
        places = ["--data-path", data, "--vocab-file", tokenizer, "--run-dir", run]
        return [self.family, *BASE.split(), *(T5.split() if self.family == "t5" else []), *self.flags.split(), *places]


CASES = {
    "gpt2": Case("gpt2", 1),
    "llama": Case("llama", 1),
    "t5": Case("t5", 1),
    "gpt2-bf16": Case("gpt2", 1, "--precision bf16", tolerance=BF16),
    # The defaults on a GPU: compiled layers, bf16, and with it this project's ZeRO 1.
    "gpt2-compiled": Case("gpt2", 1, "--compile --precision bf16", tolerance=BF16),
    "llama-compiled": Case("llama", 1, "--compile --precision bf16 --checkpoint-activations", tolerance=BF16),
    "t5-compiled": Case("t5", 1, "--compile --precision bf16", tolerance=BF16),
    "gpt2-pipe-compiled": Case(
        "gpt2", 2, f"{PIPE} --gas 4 --compile --precision bf16 --checkpoint-activations", waits=1, tolerance=BF16
    ),
    "gpt2-fp16": Case("gpt2", 1, "--precision fp16", deepspeed_waits=DEEPSPEED, tolerance=BF16),
    "gpt2-tensor": Case("gpt2", 2, TENSOR),
    "llama-tensor-bf16": Case("llama", 2, f"{TENSOR} --precision bf16", tolerance=BF16),
    # The shapes of a micro-batch of T5 differ, and are sent first: a copy to the device and one to the host.
    "t5-tensor": Case("t5", 2, TENSOR, waits=4),
    "gpt2-pipe": Case("gpt2", 2, f"{PIPE} --gas 4", waits=1),
    "gpt2-pipe-bf16": Case("gpt2", 2, f"{PIPE} --gas 4 --precision bf16", waits=1, tolerance=BF16),
    "gpt2-zb-h1": Case("gpt2", 2, f"{PIPE} --gas 4 --pipeline-schedule zb-h1", waits=1),
    "llama-interleaved": Case(
        "llama", 2, f"{PIPE} --gas 4 --pipeline-schedule interleaved --virtual-pipeline-size 2", waits=1
    ),
    "t5-pipe": Case("t5", 2, f"{PIPE} --gas 4", waits=1),
    "gpt2-pipe-tensor": Case("gpt2", 4, f"{PIPE} {TENSOR}", waits=1),
    "gpt2-context": Case("gpt2", 2, "--context-parallel-size 2"),
    "llama-context-bf16": Case("llama", 2, "--context-parallel-size 2 --precision bf16", tolerance=BF16),
    "llama-experts": Case("llama", 1, f"{EXPERTS} --precision bf16", tolerance=BF16),
    # Experts with biases, or in fp32, run one after another: in each of 4 layers, the host reads their numbers of rows.
    "gpt2-experts": Case("gpt2", 1, EXPERTS, waits=8),
    # In each of 4 layers, the host reads how many rows each rank sends.
    "llama-expert-parallel": Case(
        "llama", 2, f"{EXPERTS} --expert-parallel-size 2 --precision bf16", waits=8, tolerance=BF16
    ),
    "gpt2-zero-1": Case("gpt2", 2, "--zero-stage 1 --precision bf16", tolerance=BF16),
    "gpt2-zero-2": Case("gpt2", 2, "--zero-stage 2 --precision bf16", deepspeed_waits=DEEPSPEED, tolerance=BF16),
    "gpt2-zero-3": Case("gpt2", 2, "--zero-stage 3 --precision bf16", deepspeed_waits=DEEPSPEED, tolerance=BF16),
    "gpt2-pipe-zero-1-fp16": Case(
        "gpt2", 2, f"{PIPE} --zero-stage 1 --precision fp16", waits=1, deepspeed_waits=DEEPSPEED, tolerance=BF16
    ),
    # Muon is no fused optimizer, so the host reads whether the norm is finite.
    "gpt2-muon": Case("gpt2", 2, "--optimizer muon", waits=1),
    "gpt2-average": Case("gpt2", 1, "--ema-decay 0.9"),
    # The host compares loss and norm with those of earlier steps.
    "gpt2-spike-guard": Case("gpt2", 1, "--skip-step-sigma 6", waits=1),
    "gpt2-offload": Case("gpt2", 1, "--offload-activations"),
    # Random numbers of the stand-in come from the CPU's generator, so the masks are equal.
    "gpt2-dropout": Case("gpt2", 2, f"{TENSOR} --hidden-dropout 0.1 --attention-dropout 0.1"),
    "gpt2-resume": Case(
        "gpt2", 1, "--exit-interval 2 --save-interval 2 --async-save --save-at-end", then=("--exit-interval 4",)
    ),
    "llama-pipe-resume": Case(
        "llama", 2, f"{PIPE} --exit-interval 2 --save-interval 2 --async-save --save-at-end", waits=1,
        then=("--exit-interval 4",),
    ),
    "gpt2-tools": Case("gpt2", 1, "--save-at-end", then=(GENERATE, EVALUATE)),
    "llama-tensor-tools": Case("llama", 2, f"{TENSOR} --save-at-end", then=(f"{GENERATE} --model-parallel-size 2",)),
}  # fmt: skip
