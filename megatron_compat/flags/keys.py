"""Keys of DeepSpeed's JSON file and of Hugging Face's config.json, accepted as flags and in --config files."""

from .dependent import accumulation, deepspeed_warmup, warmup_iterations
from .outcomes import ByValue, Depends, Refused, Row, Translated, renamed, same_value, sets, user_value

GLOBAL_BATCH = Depends(accumulation, "--gas, computed from --batch-size and the number of replicas")
WARMUP_ITERATIONS = Depends(warmup_iterations, "--warmup, computed as a fraction of --lr-decay-iters")

ROWS = (
    # DeepSpeed
    renamed("--train-micro-batch-size-per-gpu", "batch_size", int),
    renamed("--gradient-accumulation-steps", "gas", int),
    renamed("--gradient-clipping", "clip_grad", float),
    Row(
        "--warmup-num-steps",
        Depends(
            deepspeed_warmup,
            "--warmup, computed as a fraction of --lr-decay-iters; this warm-up is linear, DeepSpeed's by default "
            "logarithmic",
        ),
        int,
    ),
    renamed("--steps-per-print", "log_interval", int),
    # Hugging Face
    renamed("--num-hidden-layers --n-layer --n-layers", "num_layers", int),
    renamed("--n-embd --d-model", "hidden_size", int),
    renamed("--n-head --n-heads --num-heads", "num_attention_heads", int),
    renamed("--intermediate-size --n-inner --d-ff", "ff_hidden_size", int),
    renamed("--head-dim --d-kv", "kv_hidden_size", int),
    renamed("--n-positions --n-ctx", "max_position_embeddings", int),
    renamed("--rms-norm-eps --layer-norm-epsilon --layer-norm-eps", "layernorm_epsilon", float),
    Row(
        "--activation-function",
        ByValue(
            {
                "gelu": Translated({"activation": "gelu"}),
                **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), Translated({"activation": "gelu-tanh"})),
                "relu": Translated({"activation": "relu"}),
            },
            Refused("this activation is not supported; see --activation for the supported ones"),
        ),
        str,
    ),
    Row(
        "--hidden-act",
        ByValue(
            {"silu": Translated({"activation": "swiglu"}, "the gated MLP of Llama")},
            Refused("the key does not say whether the MLP is gated, as a Llama's is; give --activation"),
        ),
        str,
    ),
    renamed("--resid-pdrop --embd-pdrop", "hidden_dropout", float),
    renamed("--attn-pdrop", "attention_dropout", float),
    Row("--dropout --dropout-rate", Translated({"hidden_dropout": user_value, "attention_dropout": user_value}), float),
    Row(
        "--initializer-range",
        same_value(
            "init_method_std",
            "output projections get this divided by sqrt(2 x layers), as in GPT-2; transformers' Llama does not divide",
        ),
        float,
    ),
    sets("--tie-word-embeddings", tie_embeddings=True),
)
