"""Flags of CPM-Pretrain and Megatron-LM (1 and 2): their translation, or the reason why they are refused.

`ROWS` also includes flags of Megatron Core (core.py) and keys of JSON files (keys.py).
`translate.py` uses this table to translate and suggest flags. docs/migration.md shows the table.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from . import core as foreign_core
from . import keys as foreign_keys
from .dependent import (
    constant_weight_decay,
    fp32_sums,
    gated_width,
    in_samples,
    merge_file,
    no_learned_positions,
    query_key_norms,
    rampup,
    virtual_pipeline,
    warmup_samples,
    warmup_tokens,
    window_size,
)
from .outcomes import (
    SAME_LOSS,
    ByValue,
    Depends,
    NoEffect,
    Refused,
    Row,
    Translated,
    no_effect,
    only,
    refer_to_json,
    refused,
    renamed,
    same_value,
    sets,
    user_value,
)

_IN_FP32 = NoEffect("attention kernels accumulate in fp32; with dropout, a CPU rounds scores as Megatron-LM does")
_EVENTS = NoEffect("metrics.jsonl and TensorBoard get all metrics every --log-interval iterations")
_WHOLE_LAYERS = Translated({"checkpoint_activations": True})
_SELECTIVE = Translated({"checkpoint_attention": True})
_ALWAYS = NoEffect("every run uses DeepSpeed")
_REALM = Refused("there are no retrieval models")
_ROPE = Translated({"position_embedding": "rope"})


def counted_from_1(words: Any) -> list[str]:
    """Convert zero-based iterations and ranges A-B of iterations to one-based.

    Words without a number stay as they are; the check of --skip-iterations refuses them.
    """
    word_list = words if isinstance(words, (list, tuple)) else [words]  # a JSON file may hold a single one
    return [re.sub(r"\d{1,18}", lambda match: str(int(match[0]) + 1), str(word)) for word in word_list]


MEGATRON = (
    # layout and batch
    renamed("--micro-batch-size", "batch_size", int),
    Row("--global-batch-size --train-batch-size", foreign_keys.GLOBAL_BATCH, int),
    Row(
        "--rampup-batch-size",
        Depends(rampup, "--batch-size-schedule, computed from the three numbers and the global batch size"),
        list,
    ),
    Row(
        "--step-batch-size-schedule",
        same_value(
            "batch_size_schedule",
            "in Megatron-LM, the learning rate of --train-iters follows samples, and --train-samples includes an "
            "incomplete last batch",
        ),
        str,
    ),
    Row(
        "--num-layers-per-virtual-pipeline-stage",
        Depends(
            virtual_pipeline,
            "--pipeline-schedule interleaved --virtual-pipeline-size, computed from --num-layers",
        ),
        int,
    ),
    Row("--standalone-embedding-stage", foreign_core.STAGE_SPLIT),
    sets("--use-distributed-optimizer", zero_stage=1),
    no_effect("--zero-reduce-scatter --zero-contigious-gradients", "DeepSpeed always does this"),
    Row("--zero-reduce-bucket-size", refer_to_json("zero_optimization", "reduce_bucket_size"), int),
    Row("--zero-allgather-bucket-size", refer_to_json("zero_optimization", "allgather_bucket_size"), int),
    Row("--cpu-optimizer", refer_to_json("zero_optimization", "offload_optimizer")),
    no_effect("--cpu_torch_adam", "on CPUs, the optimizer is always torch's"),
    no_effect("--distributed-backend", "the device determines the backend, NCCL for GPUs and gloo for CPUs", str),
    no_effect("--tp-comm-overlap", "matmuls and their communication are separate kernels"),
    no_effect("--DDP-impl", "--overlap-grad-reduce sets how replicas reduce gradients", str),
    no_effect("--no-contiguous-buffers-in-local-ddp", "--overlap-grad-reduce sets how replicas reduce gradients"),
    no_effect(
        "--no-scatter-gather-tensors-in-pipeline",
        "the flag does not change the loss; each rank always sends only its slice of a tensor",
    ),
    no_effect("--empty-unused-memory-level", "a run never releases the memory that torch's allocator caches", int),
    no_effect("--manual-gc --no-manual-gc-eval", "--manual-gc-interval sets when garbage is collected"),
    refused(
        "--lazy-mpu-init",
        "process groups are always created after all ranks have joined; leave this flag out",
        str,
    ),
    no_effect(
        "--use-cpu-initialization",
        "initial weights depend on --seed and the parameter names, not on the device",
    ),
    Row("--deepscale", _ALWAYS),
    Row("--deepspeed", ByValue({"True": _ALWAYS}, same_value("deepspeed_config")), object),
    renamed("--deepspeed_config --deepscale_config", "deepspeed_config", str),
    refused("--deepspeed_mpi", "start the ranks with tools/launch.py, torchrun or deepspeed"),
    # model
    renamed("--ffn-hidden-size", "ff_hidden_size", int),
    renamed("--kv-channels", "kv_hidden_size", int),
    renamed("--encoder-num-layers", "num_layers", int),
    renamed("--decoder-num-layers", "num_decoder_layers", int),
    renamed("--norm-epsilon", "layernorm_epsilon", float),
    Row(
        "--disable-bias-linear",
        Translated(
            {"hidden_bias": False},
            "Megatron-LM's GELU is the tanh form only if it is fused with a bias",
            {"activation": "gelu"},
        ),
    ),
    sets("--untie-embeddings-and-output-weights", tie_embeddings=False),
    sets("--openai-gelu", activation="gelu-tanh"),
    refused("--num-unique-layers --param-sharing-style", "layers do not share weights", str),
    refused("--apply-residual-connection-post-layernorm", "norms always come before attention and MLP (pre-LN)"),
    refused("--bert-no-binary-head", "there is no BERT model"),
    refused("--onnx-safe", "export to Hugging Face with tools/convert_checkpoint.py, and from there to ONNX", str),
    refused(
        "--init-method-xavier-uniform --data-parallel-random-init",
        "weights are drawn from a normal distribution; see --init-method-std",
    ),
    Row("--attention-backend", SAME_LOSS, str),
    no_effect("--use-mcore-models", "each model has one implementation"),
    no_effect("--transformer-impl", "each model has one implementation", str),
    # Llama
    Row("--num-query-groups", same_value("num_key_value_heads", "Megatron-LM needs group_query_attention, too"), int),
    Row("--group-query-attention", Translated({}, "Megatron-LM's default is one group", {"num_key_value_heads": 1})),
    Row(
        "--swiglu",
        Translated(
            {"activation": "swiglu"},
            "the MLP width is 8/3 of --hidden-size, rounded down to a multiple of 64, as in Megatron-LM",
            {"ff_hidden_size": gated_width},
        ),
    ),
    refused(
        "--squared-relu --quick-geglu",
        "this activation is not supported; see --activation for the supported ones",
    ),
    refused("--apply-layernorm-1p", "norm weights are always stored as they are, without subtracting 1"),
    Row("--qk-layernorm", Depends(query_key_norms, "--qk-norm if --normalization is rmsnorm, refused otherwise")),
    refused("--qk-l2-norm", "the norms of --qk-norm always have a learned weight"),
    # A constant True would have an opposite, but a False only means that other settings decide.
    Row("--add-qkv-bias", Translated({"qkv_bias": bool})),
    Row("--use-rotary-position-embeddings", _ROPE),
    Row(
        "--position-embedding-type",
        ByValue(
            {
                "rope": _ROPE,
                "learned_absolute": Translated({"position_embedding": "learned"}),
                "relative": Translated({"position_embedding": "relative"}),
                "yarn": Refused("use --position-embedding rope --rope-scaling yarn, and set yarn's other flags"),
                **dict.fromkeys(
                    ("mrope", "none"),
                    Refused("this value is not supported; see --position-embedding for the supported values"),
                ),
            }
        ),
        str,
    ),
    Row(
        "--no-position-embedding",
        Depends(no_learned_positions, "refused if --position-embedding is learned, otherwise no effect"),
    ),
    renamed("--rotary-base", "rope_theta", int),
    refused("--rotary-interleaved", "rotary embeddings pair the two halves of a head, as in Hugging Face"),
    Row(
        "--rotary-seq-len-interpolation-factor",
        Translated({"rope_scaling": "linear", "rope_scaling_factor": user_value}),
        int,
    ),
    Row(
        "--use-rope-scaling",
        Translated({"rope_scaling": "llama3"}, implied={"rope_scaling_factor": 8.0, "rope_original_length": 8192}),
    ),
    Row("--window-size", Depends(window_size, "--sliding-window N + 1 if the value is N,0, refused otherwise"), str),
    refused("--window-attn-skip-freq", "all layers use the same --sliding-window", str),
    refused("--multi-latent-attention", "use --num-key-value-heads to shrink keys and values"),
    # memory
    Row(
        "--checkpoint-granularity --recompute-granularity",
        ByValue({"full": _WHOLE_LAYERS, "selective": _SELECTIVE}),
        str,
    ),
    Row("--recompute-activations", _SELECTIVE),
    Row(
        "--checkpoint-method --recompute-method",
        ByValue(
            {
                "uniform": NoEffect(
                    "recomputation is always uniform, with one stored input for every --checkpoint-num-layers layers"
                ),
                "block": Refused("recomputation always covers all layers, --checkpoint-num-layers at a time"),
            }
        ),
        str,
    ),
    renamed("--recompute-num-layers", "checkpoint_num_layers", int),
    no_effect(
        "--distribute-checkpointed-activations --distribute-saved-activations --partition-activations",
        "with --sequence-parallel each model-parallel rank stores only its slice of the checkpointed inputs",
    ),
    no_effect("--deepspeed-activation-checkpointing", "--checkpoint-activations alone turns recomputation on"),
    no_effect("--contigious-checkpointing", "checkpointed inputs are not copied into one buffer"),
    refused("--checkpoint-in-cpu", "use --offload-activations instead of --checkpoint-activations"),
    no_effect("--synchronize-each-layer", "the flag would only slow the run down"),
    Row("--profile-backward --log-timers-to-tensorboard", foreign_core.TIMINGS),
    # precision
    sets("--fp16", precision="fp16"),
    sets("--bf16", precision="bf16"),
    Row("--loss-scale", refer_to_json("fp16", "loss_scale"), float),
    Row("--initial-loss-scale", refer_to_json("fp16", "initial_scale_power"), float),
    Row("--min-scale --min-loss-scale", refer_to_json("fp16", "min_loss_scale"), float),
    Row("--loss-scale-window", refer_to_json("fp16", "loss_scale_window"), float),
    Row("--hysteresis", refer_to_json("fp16", "hysteresis"), int),
    Row(
        "--fp32-allreduce --accumulate-allreduce-grads-in-fp32",
        Depends(
            fp32_sums,
            "no effect in fp32, in fp64, and in bf16 with ZeRO 1; refused otherwise, and if --deepspeed-config reduces "
            "in 16 bits",
        ),
    ),
    Row("--apply-query-key-layer-scaling --no-query-key-layer-scaling --attention-softmax-in-fp32", _IN_FP32),
    refused("--fp16-lm-cross-entropy", "the loss is always computed in fp32"),
    refused(
        "--fp32-residual-connection",
        "hidden states have the dtype of --precision; for fp32 hidden states, pass --precision fp32",
    ),
    Row(
        "--scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --bias-gelu-fusion "
        "--bias-dropout-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion "
        "--no-persist-layer-norm --use-flash-attn --no-rope-fusion --no-bias-swiglu-fusion",
        SAME_LOSS,
    ),
    Row(
        "--no-bias-gelu-fusion",
        Translated(
            {}, "Megatron-LM's fused GELU is the tanh form, its unfused GELU the erf form", {"activation": "gelu"}
        ),
    ),
    # run length and learning rate
    Row(
        "--train-tokens",
        Depends(partial(in_samples, "train_samples"), "--train-samples, computed from --seq-length"),
        int,
    ),
    Row(
        "--lr-decay-tokens",
        Depends(partial(in_samples, "lr_decay_samples"), "--lr-decay-samples, computed from --seq-length"),
        int,
    ),
    renamed("--lr-warmup-fraction", "warmup", float),
    Row("--lr-warmup-iters", foreign_keys.WARMUP_ITERATIONS, int),
    Row("--lr-warmup-samples", Depends(warmup_samples, "--warmup, computed as a fraction of --lr-decay-samples"), int),
    Row("--lr-warmup-tokens", Depends(warmup_tokens, "--warmup, computed as a fraction of --lr-decay-samples"), int),
    sets("--override-lr-scheduler --override-opt_param-scheduler", override_lr_schedule=True),
    no_effect(
        "--use-checkpoint-lr-scheduler --use-checkpoint-opt_param-scheduler",
        "a resumed run keeps its checkpoint's schedule unless --override-lr-schedule is given",
    ),
    Row(
        "--iterations-to-skip",
        Translated({"skip_iterations": counted_from_1}, "Megatron-LM counts iterations from 0, this project from 1"),
        list,
    ),
    renamed("--check-weight-hash-across-dp-replicas-interval", "check_replicas", int),
    Row("--sgd-momentum", only("0.9", "the momentum of --optimizer sgd is always 0.9"), float),
    renamed("--muon-num-ns-steps", "muon_ns_steps", int),
    refused(
        "--muon-scale-mode --muon-extra-scale-factor",
        "--muon-adjust-lr-fn original is the mode shape_scaling, and the default is 0.2 times spectral; "
        "--muon-lr-factor scales both, and the weight decay",
        str,
    ),
    Row(
        "--start-weight-decay --end-weight-decay",
        Depends(constant_weight_decay, "no effect if equal to --weight-decay, refused otherwise"),
        float,
    ),
    Row("--weight-decay-incr-style", only("constant", "--weight-decay is constant"), str),
    # data
    renamed("--encoder-seq-length", "enc_seq_length", int),
    renamed("--decoder-seq-length", "dec_seq_length", int),
    renamed("--tokenizer-model", "vocab_file", str),
    Row("--merge-file", Depends(merge_file, "no effect if --vocab-file implies this file, refused otherwise"), str),
    renamed("--vocab-extra-ids", "num_sentinels", int),
    renamed("--mask-prob", "noise_density", float),
    refused("--short-seq-prob", "all samples have the full sequence length", float),
    Row(
        "--data-impl",
        ByValue(
            {
                **dict.fromkeys(("mmap", "infer"), NoEffect(".bin and .idx files are always memory-mapped")),
                **dict.fromkeys(("lazy", "cached"), Refused("rebuild the corpus with tools/preprocess_data.py")),
            }
        ),
        str,
    ),
    no_effect("--mmap-warmup", "the memory-mapped files are read on demand"),
    Row(
        "--dataloader-type",
        ByValue(
            {
                "single": NoEffect("the data loader always reads samples in the order of the data set"),
                "cyclic": Refused("samples are always shuffled by --seed, not by the data loader"),
            }
        ),
        str,
    ),
    # checkpoints, logs and ending a run
    no_effect(
        "--no-save-optim",
        "checkpoints always contain the optimizer state; --no-load-optim ignores it when loading",
    ),
    no_effect(
        "--no-save-rng",
        "dropout depends only on --seed and the iteration, so checkpoints contain no random state",
    ),
    Row("--tensorboard-log-interval --tensorboard-queue-size", _EVENTS, int),
    Row(
        "--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--log-memory-to-tensorboard --log-world-size-to-tensorboard",
        _EVENTS,
    ),
    refused("--log-params-norm --log-num-zeros-in-grad", "only the gradient norm is logged"),
    no_effect("--exit-signal-handler", "on SIGTERM, a run always saves a checkpoint and ends"),
    refused("--adlr-autoresume", "on SIGTERM the run saves and exits; the same command resumes it"),
    refused("--adlr-autoresume-interval", "on SIGTERM the run saves and exits; the same command resumes it", int),
    # REALM
    Row(
        "--ict-head-size --indexer-batch-size --indexer-log-interval --ict-load --bert-load --titles-data-path "
        "--block-data-path --query-in-block-prob",
        _REALM,
        str,
    ),
    Row("--use-one-sent-docs --faiss-use-gpu", _REALM),
    Row("--report-topk-accuracies", _REALM, list),
)

ROWS = (*MEGATRON, *foreign_core.ROWS, *foreign_keys.ROWS)
FLAGS = {name: row for row in ROWS for name in row.names.split()}

# Flags that other frameworks have under the same name but with other values: name -> (their value -> our value).
VALUES: Mapping[str, Mapping[str, str]] = {
    "tokenizer_type": {
        "GPT2BPETokenizer": "auto",
        "T5Tokenizer": "auto",
        "SentencePieceTokenizer": "sentencepiece",
        "GPTSentencePieceTokenizer": "sentencepiece",
        "Llama2Tokenizer": "sentencepiece",
        "HuggingFaceTokenizer": "hf",
    },
    "normalization": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"},
    "lr_decay_style": {"WSD": "wsd"},
    "lr_wsd_decay_style": {"minus_sqrt": "minus-sqrt"},
}
# Values of VALUES that imply further settings.
IMPLIED: Mapping[str, Translated] = {
    "WSD": Translated(
        {"lr_decay_style": "wsd"},
        "Megatron-LM's default decay at the end is exponential",
        {"lr_wsd_decay_style": "exponential"},
    )
}
