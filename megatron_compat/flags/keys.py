"""Keys of DeepSpeed's JSON file and of Hugging Face's config.json, accepted as flags and in --config files."""

from .dependent import accumulation, warmup_iterations
from .outcomes import ByValue, Depends, Refused, Row, Translated, same_value, user_value

_ACTIVATIONS = {
    "gelu": Translated({"activation": "gelu"}),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), Translated({"activation": "gelu-tanh"})),
    "relu": Translated({"activation": "relu"}),
}
GLOBAL_BATCH = Depends(accumulation, "--gas, computed from --batch-size and the number of replicas")
WARMUP_ITERATIONS = Depends(warmup_iterations, "--warmup, computed as a fraction of --lr-decay-iters")
_NO_ACTIVATION = Refused("this activation is not supported; see --activation for the supported ones")

ROWS = (
    # DeepSpeed
    Row("--train-micro-batch-size-per-gpu", same_value("batch_size"), int),
    Row("--train-batch-size", GLOBAL_BATCH, int),
    Row("--gradient-accumulation-steps", same_value("gas"), int),
    Row("--gradient-clipping", same_value("clip_grad"), float),
    Row("--warmup-num-steps", WARMUP_ITERATIONS, int),
    Row("--steps-per-print", same_value("log_interval"), int),
    # Hugging Face
    Row("--num-hidden-layers --n-layer --n-layers", same_value("num_layers"), int),
    Row("--n-embd --d-model", same_value("hidden_size"), int),
    Row("--n-head --n-heads --num-heads", same_value("num_attention_heads"), int),
    Row("--intermediate-size --n-inner --d-ff", same_value("ff_hidden_size"), int),
    Row("--head-dim --d-kv", same_value("kv_hidden_size"), int),
    Row("--n-positions --n-ctx", same_value("max_position_embeddings"), int),
    Row("--rms-norm-eps --layer-norm-epsilon --layer-norm-eps", same_value("layernorm_epsilon"), float),
    # The silu of a Llama is gated, that of a GPT-2 is not.
    Row("--activation-function", ByValue(_ACTIVATIONS, _NO_ACTIVATION), str),
    Row(
        "--hidden-act",
        ByValue(
            {**_ACTIVATIONS, "silu": Translated({"activation": "swiglu"}, "the gated MLP of Llama")}, _NO_ACTIVATION
        ),
        str,
    ),
    Row("--resid-pdrop --embd-pdrop", same_value("hidden_dropout"), float),
    Row("--attn-pdrop", same_value("attention_dropout"), float),
    Row("--dropout --dropout-rate", Translated({"hidden_dropout": user_value, "attention_dropout": user_value}), float),
    Row("--initializer-range", same_value("init_method_std"), float),
    Row("--tie-word-embeddings", Translated({"tie_embeddings": True})),
)
