"""Foreign flags of Hugging Face's Trainer and scripts, and keys of its config.json and DeepSpeed's JSON.

See foreign_flags.py.
"""

from .dependent import accumulation, warmup_iterations
from .outcomes import SAME_LOSS, ByValue, Depends, Means, NoEffect, Refused, Row, given, same

_STYLES = Refused("--lr-decay-style says which there are")
_OPTIMIZERS = Refused("--optimizer says which there are")
_ACTIVATIONS = Refused("--activation says which there are")
_ADAM = Means({"optimizer": "adam"})
_TANH = Means({"activation": "gelu-tanh"})
_CORPUS = Refused("tools/preprocess_data.py makes a corpus of it, which --data-path takes")
_SHARED_WEIGHTS = Refused("--zero-stage 3 is what shares weights out over replicas")

ROWS = (
    # batch and length of the run
    Row("--per-device-train-batch-size --per-gpu-train-batch-size --train-micro-batch-size-per-gpu", same("batch_size"), int),
    Row("--train-batch-size", Depends(accumulation, "--gas, by --batch-size and the replicas"), int),
    Row(
        "--per-device-eval-batch-size --eval-batch-size",
        NoEffect("the loss is the same; an evaluation reads --eval-iters global batches"),
        int,
    ),
    Row("--gradient-accumulation-steps", same("gas"), int),
    Row("--max-steps", same("train_iters"), int),
    Row(
        "--num-train-epochs --epochs",
        Refused("--train-iters says how long; an epoch has about tokens of the corpus / --seq-length samples"),
        float,
    ),
    # learning rate and optimizer
    Row("--learning-rate", same("lr"), float),
    Row(
        "--lr-scheduler-type",
        ByValue(
            {
                "cosine": Means({"lr_decay_style": "cosine"}),
                "cosine_with_min_lr": Means({"lr_decay_style": "cosine"}, "--min-lr says where it ends"),
                "linear": Means({"lr_decay_style": "linear"}),
                "constant": Means({"lr_decay_style": "constant", "warmup": 0.0}),
                "constant_with_warmup": Means({"lr_decay_style": "constant"}),
                "warmup_stable_decay": Means({"lr_decay_style": "wsd"}),
            },
            _STYLES,
        ),
        str,
    ),
    Row("--warmup-ratio", same("warmup"), float),
    Row("--warmup-steps --warmup-num-steps", Depends(warmup_iterations, "--warmup, by the iterations of the decay"), int),
    Row("--max-grad-norm --gradient-clipping --grad-clip", same("clip_grad"), float),
    Row("--adam-epsilon", same("adam_eps"), float),
    Row(
        "--optim",
        ByValue(
            {
                **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), _ADAM),
                "sgd": Means({"optimizer": "sgd"}, "with a momentum of 0.9"),
            },
            _OPTIMIZERS,
        ),
        str,
    ),
    Row("--label-smoothing-factor", Refused("targets are whole tokens"), float),
    # files
    Row("--output-dir", same("run_dir"), str),
    Row("--overwrite-output-dir", Refused("a run is never written over: give another --run-dir")),
    Row("--model-name-or-path", Refused("tools/convert_checkpoint.py makes a checkpoint of it, which --load takes"), str),
    Row("--config-name", Refused("tools/convert_checkpoint.py writes its settings for --config"), str),
    Row("--tokenizer-name --tokenizer-name-or-path", same("vocab_file"), str),
    Row("--train-file --validation-file --dataset-name", _CORPUS, str),
    Row("--block-size --max-seq-length --max-seq-len --max-length", same("seq_length"), int),
    Row("--dataloader-num-workers", same("num_workers"), int),
    Row("--data-seed", Refused("--seed decides weights, order and dropout"), int),
    # saving, evaluating, logging
    Row("--save-steps", same("save_interval"), int),
    Row("--save-total-limit", same("keep_last"), int),
    Row(
        "--save-strategy",
        ByValue(
            {
                "steps": NoEffect("it is so, every --save-interval iterations"),
                "no": Means({"save_interval": 0}, "the last iteration is saved unless told --no-save-at-end"),
            },
            Refused("--save-interval counts iterations"),
        ),
        str,
    ),
    Row("--eval-steps", same("eval_interval"), int),
    Row(
        "--eval-strategy --evaluation-strategy",
        ByValue(
            {"steps": NoEffect("it is so, every --eval-interval iterations"), "no": Means({"eval_iters": 0})},
            Refused("--eval-interval counts iterations"),
        ),
        str,
    ),
    Row("--load-best-model-at-end", Refused("--keep-last and --keep-every say what stays; tools/report.py shows its losses")),
    Row(
        "--resume-from-checkpoint",
        ByValue({"True": NoEffect("it is so: the same command continues")}, same("load", "a run's own checkpoints go first")),
        str,
    ),
    Row("--logging-steps --steps-per-print", same("log_interval"), int),
    Row("--logging-dir", same("tensorboard_dir"), str),
    Row(
        "--report-to",
        ByValue(
            {"tensorboard": Means({"tensorboard": True}), "none": Means({"tensorboard": False})},
            Refused("the settings of log say where metrics go"),
        ),
        str,
    ),
    Row("--do-train", NoEffect("it is so")),
    Row("--do-eval", NoEffect("--eval-iters says how much is evaluated")),
    Row("--push-to-hub", Refused("tools/convert_checkpoint.py writes a folder for Hugging Face")),
    # memory and speed
    Row("--gradient-checkpointing", Means({"checkpoint_activations": True})),
    Row("--torch-compile", Means({"compile": True})),
    Row("--attn-implementation", SAME_LOSS, str),
    Row(
        "--torch-dtype --dtype",
        ByValue(
            {
                "auto": Means({"precision": "auto"}),
                **{f"float{bits}": Means({"precision": f"fp{bits}"}) for bits in (16, 32, 64)},
                "bfloat16": Means({"precision": "bf16"}),
            }
        ),
        str,
    ),
    Row("--ddp-timeout", Means({"distributed_timeout_minutes": lambda seconds: seconds / 60}, "there in seconds"), int),
    Row("--fsdp", _SHARED_WEIGHTS, list),
    Row("--fsdp-config", _SHARED_WEIGHTS, str),
    # keys of Hugging Face's config.json
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
                "silu": Means({"activation": "swiglu"}, "gated, as in a Llama"),
            },
            _ACTIVATIONS,
        ),
        str,
    ),
    Row("--resid-pdrop --embd-pdrop", same("hidden_dropout"), float),
    Row("--attn-pdrop", same("attention_dropout"), float),
    Row("--dropout --dropout-rate", Means({"hidden_dropout": given, "attention_dropout": given}), float),
    Row("--initializer-range", same("init_method_std"), float),
    Row("--tie-word-embeddings", Means({"tie_embeddings": True})),
)  # fmt: skip
