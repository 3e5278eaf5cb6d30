"""Flags of CPM-Pretrain and Megatron-LM (1 and 2): their translation, or the reason why they are refused.

`ROWS` also includes flags of Megatron Core (core.py) and keys of JSON files (keys.py).
`translate.py` uses this table to translate and suggest flags. docs/migration.md shows the table.
"""

import re
from collections.abc import Mapping
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
    only,
    refer_to_json,
    same_value,
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
    Row("--micro-batch-size", same_value("batch_size"), int),
    Row("--global-batch-size", foreign_keys.GLOBAL_BATCH, int),
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
    Row("--use-distributed-optimizer", Translated({"zero_stage": 1})),
    Row("--zero-reduce-scatter --zero-contigious-gradients", NoEffect("DeepSpeed always does this")),
    Row("--zero-reduce-bucket-size", refer_to_json("zero_optimization", "reduce_bucket_size"), int),
    Row("--zero-allgather-bucket-size", refer_to_json("zero_optimization", "allgather_bucket_size"), int),
    Row("--cpu-optimizer", refer_to_json("zero_optimization", "offload_optimizer")),
    Row("--cpu_torch_adam", NoEffect("on CPUs, the optimizer is always torch's")),
    Row("--distributed-backend", NoEffect("the device determines the backend, NCCL for GPUs and gloo for CPUs"), str),
    Row("--tp-comm-overlap", NoEffect("matmuls and their communication are separate kernels")),
    Row("--DDP-impl", NoEffect("--overlap-grad-reduce sets how replicas reduce gradients"), str),
    Row("--no-contiguous-buffers-in-local-ddp", NoEffect("--overlap-grad-reduce sets how replicas reduce gradients")),
    Row(
        "--no-scatter-gather-tensors-in-pipeline",
        NoEffect("the flag does not change the loss; each rank always sends only its slice of a tensor"),
    ),
    Row("--empty-unused-memory-level", NoEffect("a run never releases the memory that torch's allocator caches"), int),
    Row("--manual-gc --no-manual-gc-eval", NoEffect("--manual-gc-interval sets when garbage is collected")),
    Row(
        "--lazy-mpu-init",
        Refused("process groups are always created after all ranks have joined; leave this flag out"),
        str,
    ),
    Row(
        "--use-cpu-initialization",
        NoEffect("initial weights depend on --seed and the parameter names, not on the device"),
    ),
    Row("--deepscale", _ALWAYS),
    Row("--deepspeed", ByValue({"True": _ALWAYS}, same_value("deepspeed_config")), object),
    Row("--deepspeed_config --deepscale_config", same_value("deepspeed_config"), str),
    Row("--deepspeed_mpi", Refused("start the ranks with tools/launch.py, torchrun or deepspeed")),
    # model
    Row("--ffn-hidden-size", same_value("ff_hidden_size"), int),
    Row("--kv-channels", same_value("kv_hidden_size"), int),
    Row("--encoder-num-layers", same_value("num_layers"), int),
    Row("--decoder-num-layers", same_value("num_decoder_layers"), int),
    Row("--norm-epsilon", same_value("layernorm_epsilon"), float),
    Row(
        "--disable-bias-linear",
        Translated(
            {"hidden_bias": False},
            "Megatron-LM's GELU is the tanh form only if it is fused with a bias",
            {"activation": "gelu"},
        ),
    ),
    Row("--untie-embeddings-and-output-weights", Translated({"tie_embeddings": False})),
    Row("--openai-gelu", Translated({"activation": "gelu-tanh"})),
    Row("--num-unique-layers --param-sharing-style", Refused("layers do not share weights"), str),
    Row("--apply-residual-connection-post-layernorm", Refused("norms always come before attention and MLP (pre-LN)")),
    Row("--bert-no-binary-head", Refused("there is no BERT model")),
    Row("--onnx-safe", Refused("export to Hugging Face with tools/convert_checkpoint.py, and from there to ONNX"), str),
    Row(
        "--init-method-xavier-uniform --data-parallel-random-init",
        Refused("weights are drawn from a normal distribution; see --init-method-std"),
    ),
    Row("--attention-backend", SAME_LOSS, str),
    Row("--use-mcore-models", NoEffect("each model has one implementation")),
    Row("--transformer-impl", NoEffect("each model has one implementation"), str),
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
    Row(
        "--squared-relu --quick-geglu",
        Refused("this activation is not supported; see --activation for the supported ones"),
    ),
    Row("--apply-layernorm-1p", Refused("norm weights are always stored as they are, without subtracting 1")),
    Row("--qk-layernorm", Depends(query_key_norms, "--qk-norm if --normalization is rmsnorm, refused otherwise")),
    Row("--qk-l2-norm", Refused("the norms of --qk-norm always have a learned weight")),
    Row("--add-qkv-bias", Translated({"qkv_bias": True})),
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
    Row("--rotary-base", same_value("rope_theta"), int),
    Row("--rotary-interleaved", Refused("rotary embeddings pair the two halves of a head, as in Hugging Face")),
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
    Row("--window-attn-skip-freq", Refused("all layers use the same --sliding-window"), str),
    Row("--multi-latent-attention", Refused("use --num-key-value-heads to shrink keys and values")),
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
    Row("--recompute-num-layers", same_value("checkpoint_num_layers"), int),
    Row(
        "--distribute-checkpointed-activations --distribute-saved-activations --partition-activations",
        NoEffect("with --sequence-parallel each model-parallel rank stores only its slice of the checkpointed inputs"),
    ),
    Row("--deepspeed-activation-checkpointing", NoEffect("--checkpoint-activations alone turns recomputation on")),
    Row("--contigious-checkpointing", NoEffect("checkpointed inputs are not copied into one buffer")),
    Row("--checkpoint-in-cpu", Refused("use --offload-activations instead of --checkpoint-activations")),
    Row("--synchronize-each-layer", NoEffect("the flag would only slow the run down")),
    Row("--profile-backward --log-timers-to-tensorboard", foreign_core.TIMINGS),
    # precision
    Row("--fp16", Translated({"precision": "fp16"})),
    Row("--bf16", Translated({"precision": "bf16"})),
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
    Row("--fp16-lm-cross-entropy", Refused("the loss is always computed in fp32")),
    Row(
        "--fp32-residual-connection",
        Refused("hidden states have the dtype of --precision; for fp32 hidden states, pass --precision fp32"),
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
    Row("--train-tokens", Depends(in_samples("train_samples"), "--train-samples, computed from --seq-length"), int),
    Row(
        "--lr-decay-tokens",
        Depends(in_samples("lr_decay_samples"), "--lr-decay-samples, computed from --seq-length"),
        int,
    ),
    Row("--lr-warmup-fraction", same_value("warmup"), float),
    Row("--lr-warmup-iters", foreign_keys.WARMUP_ITERATIONS, int),
    Row("--lr-warmup-samples", Depends(warmup_samples, "--warmup, computed as a fraction of --lr-decay-samples"), int),
    Row("--lr-warmup-tokens", Depends(warmup_tokens, "--warmup, computed as a fraction of --lr-decay-samples"), int),
    Row("--override-lr-scheduler --override-opt_param-scheduler", Translated({"override_lr_schedule": True})),
    Row(
        "--use-checkpoint-lr-scheduler --use-checkpoint-opt_param-scheduler",
        NoEffect("a resumed run keeps its checkpoint's schedule unless --override-lr-schedule is given"),
    ),
    Row(
        "--iterations-to-skip",
        Translated({"skip_iterations": counted_from_1}, "Megatron-LM counts iterations from 0, this project from 1"),
        list,
    ),
    Row("--check-weight-hash-across-dp-replicas-interval", same_value("check_replicas"), int),
    Row("--sgd-momentum", only("0.9", "the momentum of --optimizer sgd is always 0.9"), float),
    Row("--muon-num-ns-steps", same_value("muon_ns_steps"), int),
    Row(
        "--muon-scale-mode --muon-extra-scale-factor",
        Refused(
            "--muon-adjust-lr-fn original is the mode shape_scaling, and the default is 0.2 times spectral; "
            "--muon-lr-factor scales both, and the weight decay"
        ),
        str,
    ),
    Row(
        "--start-weight-decay --end-weight-decay",
        Depends(constant_weight_decay, "no effect if equal to --weight-decay, refused otherwise"),
        float,
    ),
    Row("--weight-decay-incr-style", only("constant", "--weight-decay is constant"), str),
    # data
    Row("--encoder-seq-length", same_value("enc_seq_length"), int),
    Row("--decoder-seq-length", same_value("dec_seq_length"), int),
    Row("--tokenizer-model", same_value("vocab_file"), str),
    Row("--merge-file", Depends(merge_file, "no effect if --vocab-file implies this file, refused otherwise"), str),
    Row("--vocab-extra-ids", same_value("num_sentinels"), int),
    Row("--mask-prob", same_value("noise_density"), float),
    Row("--short-seq-prob", Refused("all samples have the full sequence length"), float),
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
    Row("--mmap-warmup", NoEffect("the memory-mapped files are read on demand")),
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
    Row(
        "--no-save-optim",
        NoEffect("checkpoints always contain the optimizer state; --no-load-optim ignores it when loading"),
    ),
    Row(
        "--no-save-rng",
        NoEffect("dropout depends only on --seed and the iteration, so checkpoints contain no random state"),
    ),
    Row("--tensorboard-log-interval --tensorboard-queue-size", _EVENTS, int),
    Row(
        "--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--log-memory-to-tensorboard --log-world-size-to-tensorboard",
        _EVENTS,
    ),
    Row("--log-params-norm --log-num-zeros-in-grad", Refused("only the gradient norm is logged")),
    Row("--exit-signal-handler", NoEffect("on SIGTERM, a run always saves a checkpoint and ends")),
    Row("--adlr-autoresume", Refused("on SIGTERM the run saves and exits; the same command resumes it")),
    Row("--adlr-autoresume-interval", Refused("on SIGTERM the run saves and exits; the same command resumes it"), int),
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
