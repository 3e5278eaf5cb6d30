"""Keys of DeepSpeed's JSON file and of Hugging Face's config.json, accepted as flags and in --config files."""

from .dependent import accumulation, warmup_iterations
from .outcomes import ByValue, Depends, Means, Refused, Row, given, same

_TANH = Means({"activation": "gelu-tanh"})

ROWS = (
    # DeepSpeed
    Row("--train-micro-batch-size-per-gpu", same("batch_size"), int),
    Row(
        "--train-batch-size", Depends(accumulation, "--gas, computed from --batch-size and the number of replicas"), int
    ),
    Row("--gradient-accumulation-steps", same("gas"), int),
    Row("--gradient-clipping", same("clip_grad"), float),
    Row("--warmup-num-steps", Depends(warmup_iterations, "--warmup, computed as a fraction of --lr-decay-iters"), int),
    Row("--steps-per-print", same("log_interval"), int),
    # Hugging Face
    Row("--num-hidden-layers --n-layer --n-layers", same("num_layers"), int),
    Row("--n-embd --d-model", same("hidden_size"), int),
    Row("--n-head --n-heads --num-heads", same("num_attention_heads"), int),
    Row("--intermediate-size --n-inner --d-ff", same("ff_hidden_size"), int),
    Row("--head-dim --d-kv", same("kv_hidden_size"), int),
    Row("--n-positions --n-ctx", same("max_position_embeddings"), int),
    Row("--rms-norm-eps --layer-norm-epsilon --layer-norm-eps", same("layernorm_epsilon"), float),
    Row(
        "--hidden-act --activation-function",
        ByValue(
            {
                "gelu": Means({"activation": "gelu"}),
                **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), _TANH),
                "relu": Means({"activation": "relu"}),
                "silu": Means({"activation": "swiglu"}, "the gated MLP of Llama"),
            },
            Refused("this activation is not supported; see --activation for the supported ones"),
        ),
        str,
    ),
    Row("--resid-pdrop --embd-pdrop", same("hidden_dropout"), float),
    Row("--attn-pdrop", same("attention_dropout"), float),
    Row("--dropout --dropout-rate", Means({"hidden_dropout": given, "attention_dropout": given}), float),
    Row("--initializer-range", same("init_method_std"), float),
    Row("--tie-word-embeddings", Means({"tie_embeddings": True})),
)
