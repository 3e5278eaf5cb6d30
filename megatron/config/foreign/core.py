"""Flags of Megatron Core that Megatron-LM 1 and 2 lack, and other spellings of layout sizes.

See foreign_flags.py.
"""

from .outcomes import SAME_LOSS, Means, NoEffect, Refused, Row, given, in_json, same

_NO_EXPERTS = Refused("there are no experts; every token passes the same MLP")
_ONE_FORMAT = NoEffect("checkpoints have one format, which every layout reads")
_CUTS = Refused("--partition-method says where the layers are cut")
_SHARED_WEIGHTS = Refused("--zero-stage 3 is what shares weights out over replicas")
_NO_FP8 = Refused("--precision says which there are")

ROWS = (
    Row("--tensor-parallel-size --tp-size", same("model_parallel_size"), int),
    Row(
        "--pipeline-parallel-size --pp-size",
        Means({"pipe_parallel_size": lambda n: 0 if n == 1 else n}, "no pipeline is 1 there and 0 here"),
        int,
    ),
    Row("--cp-size", same("context_parallel_size"), int),
    Row(
        "--num-virtual-stages-per-pipeline-rank --virtual-pipeline-model-parallel-size",
        Means({"pipeline_schedule": "interleaved", "virtual_pipeline_size": given}),
        int,
    ),
    Row("--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers", _CUTS, int),
    Row("--pipeline-model-parallel-layout", _CUTS, str),
    Row(
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        NoEffect("--partition-method balanced counts them"),
    ),
    Row("--expert-model-parallel-size --expert-tensor-parallel-size --moe-router-topk --moe-ffn-hidden-size", _NO_EXPERTS, int),
    Row("--moe-router-load-balancing-type --moe-token-dispatcher-type", _NO_EXPERTS, str),
    Row("--moe-aux-loss-coeff", _NO_EXPERTS, float),
    Row("--moe-grouped-gemm --moe-permute-fusion", _NO_EXPERTS),
    Row("--use-torch-fsdp2 --use-megatron-fsdp", _SHARED_WEIGHTS),
    Row("--overlap-param-gather", NoEffect("the loss is the same; --zero-stage 1 gathers weights at the end of a step")),
    Row("--tp-comm-overlap", NoEffect("--async-tensor-model-parallel-allreduce is what overlaps, and it is on")),
    Row("--cp-comm-type", NoEffect("there is one way: keys and values are gathered"), list),
    Row("--optimizer-cpu-offload", in_json("zero_optimization", "offload_optimizer")),
    Row("--cpu-offloading-num-layers", Refused("--offload-activations moves those of all layers"), int),
    Row("--cross-entropy-loss-fusion --enable-cuda-graph --external-cuda-graph --te-rng-tracker", SAME_LOSS),
    Row("--cross-entropy-fusion-impl", SAME_LOSS, str),
    Row("--calculate-per-token-loss", NoEffect("it is so: a loss is the mean over all target tokens")),
    Row("--no-check-for-nan-in-loss-and-grad", Refused("a step whose gradient is not finite is never applied")),
    Row("--fp8-format --fp8-recipe", _NO_FP8, str),
    Row("--fp8-param-gather", _NO_FP8),
    Row("--lr-warmup-init", Refused("the learning rate rises from 0"), float),
    Row("--mock-data", Refused("give --data-path; corpus/sample.jsonl is a small text")),
    Row("--data-args-path --per-split-data-args-path", Refused("--data-path, --train-data-path and their sisters name corpora"), str),
    Row("--no-mmap-bin-files", NoEffect("pairs of .bin and .idx are always mapped")),
    Row("--no-create-attention-mask-in-dataloader", NoEffect("it is so: samples have no masks")),
    Row("--pretrained-checkpoint", Means({"load": given, "finetune": True}), str),
    Row("--use-checkpoint-args", Refused("give that run's config.json with --config")),
    Row("--exit-on-missing-checkpoint", NoEffect("it is so: --load without a checkpoint is an error")),
    Row("--ckpt-format --dist-ckpt-format", _ONE_FORMAT, str),
    Row(
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-save --ckpt-fully-parallel-load "
        "--ckpt-assume-constant-structure",
        _ONE_FORMAT,
    ),
    Row("--log-throughput", NoEffect("it is so")),
    Row("--timing-log-level", NoEffect("metrics.jsonl has the times there are"), int),
    Row("--timing-log-option", NoEffect("metrics.jsonl has the times there are"), str),
)  # fmt: skip
