"""Flags of Megatron Core that Megatron-LM 1 and 2 lack, and sizes of the parallel layout.

flags.py adds the rows of this module to its table.
"""

import ast
import contextlib
from collections.abc import Mapping
from typing import Any

from .outcomes import (
    SAME_LOSS,
    ByValue,
    NoEffect,
    Refused,
    Row,
    Translated,
    no_effect,
    only,
    refer_to_json,
    refused,
    renamed,
    sets,
    user_value,
)

_DROPLESS = Refused("no token is dropped, so experts have no capacity")
_ONE_FORMAT = NoEffect("checkpoints have only one format, which every layout can load")
STAGE_SPLIT = Refused("--partition-method sets how layers are split into stages")
_SHARED_WEIGHTS = Refused("use --zero-stage 3 to shard weights over replicas")
_DEFAULT_AUX_LOSS = "Megatron-LM's factor of the auxiliary loss is 0 by default"
_NO_AUX_LOSS = {"router_aux_loss": 0.0}
TIMINGS = NoEffect('"wall_clock_breakdown": true in --deepspeed-config adds timings to the log and to metrics.jsonl')


def _expert_setting(setting: str, value: Any) -> Translated:
    """Return a translation to a setting of experts, with Megatron-LM's default factor of the auxiliary loss."""
    return Translated({setting: value}, _DEFAULT_AUX_LOSS, implied=_NO_AUX_LOSS)


def _layer_words(value: Any) -> tuple[str, ...]:
    """Return the words of --moe-layer-frequency for a number, a list, or a list expression such as ([0]+[1]*3)*2.

    A value with an error becomes one word, which the check of --moe-layer-frequency refuses.
    """
    text = str(value)
    with contextlib.suppress(Exception):  # a number is no list, and a wrong expression can raise errors of any class
        return tuple(map(str, _evaluate(ast.parse(text, mode="eval").body)))
    return (text,)


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal, or of sums and products of literals. No code runs, unlike with eval()."""
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _evaluate(left) * _evaluate(right)
    return ast.literal_eval(node)


_AUX_LOSS = _expert_setting("router_balance", "aux-loss")
EXPERT_BIAS = "--moe-router-enable-expert-bias"
BALANCING = "--moe-router-load-balancing-type"


def with_expert_bias(flags: Mapping[str, Any]) -> Translated | None:
    """Return the joint translation of Megatron-LM's two ways to balance routers; None if only one of them is given.

    Megatron-LM adds the bias to the auxiliary loss, which its factor and BALANCING turn on.
    flags: the given flags of Megatron-LM, with their values.
    """
    kind = flags.get(BALANCING, "aux_loss")  # "aux_loss" is the default of Megatron-LM
    # With other kinds, and without the bias, each flag is translated or refused on its own.
    if flags.get(EXPERT_BIAS) is not True or kind not in ("aux_loss", "global_aux_loss", "none"):
        return None
    if kind != "none" and flags.get("--moe-aux-loss-coeff"):  # the factor is 0 by default
        return Translated({"router_balance": "bias-and-aux-loss"})
    if BALANCING in flags:
        return Translated({"router_balance": "bias"})
    return None  # the row of EXPERT_BIAS has the same translation


_NO_FP8 = Refused("the only FP8 recipe is that of --precision fp8; use this flag instead")

ROWS = (
    renamed("--tensor-model-parallel-size --tensor-parallel-size --tp-size", "model_parallel_size", int),
    Row(
        "--pipeline-model-parallel-size --pipeline-parallel-size --pp-size",
        Translated(
            {"pipe_parallel_size": lambda n: 0 if n == 1 else n},
            "size 1, which means no pipeline in Megatron-LM, becomes 0",
        ),
        int,
    ),
    renamed("--cp-size", "context_parallel_size", int),
    Row(
        "--num-virtual-stages-per-pipeline-rank --virtual-pipeline-model-parallel-size",
        Translated({"pipeline_schedule": "interleaved", "virtual_pipeline_size": user_value}),
        int,
    ),
    Row(
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout "
        "--pipeline-model-parallel-split-rank",
        STAGE_SPLIT,
        str,
    ),
    no_effect(
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        "--partition-method balanced always counts the work of the embedding and the loss",
    ),
    Row("--expert-model-parallel-size", _expert_setting("expert_parallel_size", user_value), int),
    no_effect(
        "--expert-tensor-parallel-size",
        "experts are always split over --model-parallel-size ranks, which does not change the loss",
        int,
    ),
    Row("--moe-router-topk", _expert_setting("experts_per_token", user_value), int),
    Row("--moe-ffn-hidden-size", _expert_setting("expert_ff_hidden_size", user_value), int),
    refused("--moe-shared-expert-intermediate-size", "give --num-shared-experts, each as wide as an expert", int),
    Row("--moe-layer-freq", _expert_setting("moe_layer_frequency", _layer_words), str),
    Row(
        "--moe-router-score-function",
        ByValue(
            {
                "softmax": _expert_setting("router_score", "softmax"),
                "sigmoid": Translated(
                    {"router_score": "sigmoid"},
                    "Megatron-LM normalizes sigmoid scores, except that of a single expert",
                    implied={
                        "normalize_expert_weights": lambda values: values["experts_per_token"] != 1,
                        **_NO_AUX_LOSS,
                    },
                ),
            }
        ),
        str,
    ),
    Row(
        "--moe-router-pre-softmax",
        Translated(
            {},
            "Megatron-LM always normalizes sigmoid scores of several experts",
            implied={
                "normalize_expert_weights": lambda values: values["router_score"] == "sigmoid",
                **_NO_AUX_LOSS,
            },
        ),
    ),
    Row(
        BALANCING,
        ByValue(
            {
                "aux_loss": _AUX_LOSS,
                "global_aux_loss": _AUX_LOSS,
                "none": Translated({"router_balance": "none"}),
            },
            Refused("choose --router-balance aux-loss, bias, bias-and-aux-loss or none"),
        ),
        str,
    ),
    renamed("--moe-aux-loss-coeff", "router_aux_loss", float),
    Row("--moe-z-loss-coeff", _expert_setting("router_z_loss", user_value), float),
    renamed("--moe-input-jitter-eps", "router_jitter", float),
    sets(EXPERT_BIAS, router_balance="bias"),
    renamed("--moe-router-bias-update-rate", "router_bias_rate", float),
    Row("--moe-expert-capacity-factor", _DROPLESS, float),
    Row("--moe-pad-expert-input-to-capacity", _DROPLESS),
    Row("--moe-router-dtype", only("fp32", "routers compute in fp32"), str),
    Row("--use-torch-fsdp2 --use-megatron-fsdp", _SHARED_WEIGHTS),
    no_effect("--cp-comm-type", "context parallelism always all-gathers keys and values", list),
    Row("--optimizer-cpu-offload", refer_to_json("zero_optimization", "offload_optimizer")),
    refused(
        "--cpu-offloading-num-layers",
        "use --offload-activations, which offloads the activations of all layers",
        int,
    ),
    Row(
        "--cross-entropy-loss-fusion --enable-cuda-graph --external-cuda-graph --te-rng-tracker --moe-grouped-gemm "
        "--moe-permute-fusion",
        SAME_LOSS,
    ),
    Row("--cross-entropy-fusion-impl --moe-token-dispatcher-type", SAME_LOSS, str),
    no_effect("--use-precision-aware-optimizer", "--exp-avg-dtype and --exp-avg-sq-dtype need no other flag"),
    no_effect("--calculate-per-token-loss", "the loss is always the mean over all target tokens"),
    refused("--no-check-for-nan-in-loss-and-grad", "steps with a NaN or Inf gradient are always skipped"),
    Row("--fp8-format --fp8-recipe", _NO_FP8, str),
    Row("--fp8-param-gather", _NO_FP8),
    Row("--lr-warmup-init", only("0.0 0", "the warmup of the learning rate always starts from 0"), float),
    refused("--mock-data", "give --data-path; to try a run, preprocess corpus/sample.jsonl"),
    refused(
        "--data-args-path --per-split-data-args-path",
        "name corpora with --data-path, or with --train-data-path, --valid-data-path and --test-data-path",
        str,
    ),
    no_effect("--no-mmap-bin-files", ".bin and .idx files are always memory-mapped"),
    no_effect("--no-create-attention-mask-in-dataloader", "samples never contain attention masks"),
    Row("--pretrained-checkpoint", Translated({"load": user_value, "finetune": True}), str),
    refused("--use-checkpoint-args", "pass --config with the config.json of the run that wrote the checkpoint"),
    refused("--ckpt-step", "name the checkpoint itself, as in --load runs/mine/checkpoints/iter_0000200", int),
    Row("--ckpt-format --dist-ckpt-format", _ONE_FORMAT, str),
    Row(
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-save --ckpt-fully-parallel-load "
        "--ckpt-assume-constant-structure",
        _ONE_FORMAT,
    ),
    no_effect("--log-throughput", "the throughput is always logged"),
    Row("--timing-log-level --timing-log-option", TIMINGS, str),
)
