"""For each setting a value other than its default and a small run in which it has an effect."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A setting with another value, and the run in which both values are compared.

    change: flags that set it. beside: flags of both runs. model: key of `MODELS`, or a family. in_ci: also without
    --full.
    """

    change: str
    beside: str = ""
    model: str = "gpt2"
    ranks: int = 1
    in_ci: bool = False


EXPERTS = "--num-experts 4"
YARN = "--kv-hidden-size 16 --rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 4096"
LLAMA3 = "--kv-hidden-size 16 --rope-scaling llama3 --rope-scaling-factor 4 --rope-original-length 8"
PIPE = "--pipe-parallel-size 2 --gas 4"
MUON = "--optimizer muon --lr 1e-2"
DECAY = "--lr-decay-style cosine --train-iters 6"
WSD = "--lr-decay-style wsd --train-iters 8 --lr-wsd-decay-iters 4"
WIDE = "--mup-base-hidden-size 8"
EVALUATES = "--eval-iters 1 --split 8,1,1"
LOADS = "--load {here}/before --train-iters 5 --hidden-dropout 0.1"
SAVES = "--train-iters 4 --save-interval 1"
FIM = "--vocab-file {here}/fim.model --fim-rate 0.9 --fim-tokens <a> <b> <c>"

CASES: dict[str, Case] = {
    # experts
    "num_experts": Case(EXPERTS, in_ci=True),
    "experts_per_token": Case("--experts-per-token 3", EXPERTS),
    "expert_ff_hidden_size": Case("--expert-ff-hidden-size 8", EXPERTS),
    "num_shared_experts": Case("--num-shared-experts 1", EXPERTS),
    "shared_expert_gate": Case("--shared-expert-gate", f"{EXPERTS} --num-shared-experts 1"),
    "moe_layer_frequency": Case("--moe-layer-frequency 2", EXPERTS),
    "router_score": Case("--router-score sigmoid", EXPERTS),
    "normalize_expert_weights": Case("--no-normalize-expert-weights", EXPERTS),
    "router_balance": Case("--router-balance none", EXPERTS),
    "router_aux_loss": Case("--router-aux-loss 0.5", EXPERTS),
    "router_bias_rate": Case("--router-bias-rate 0.5", f"{EXPERTS} --router-balance bias"),
    "router_z_loss": Case("--router-z-loss 0.5", EXPERTS),
    "router_jitter": Case("--router-jitter 0.5", EXPERTS),
    # decoders
    "num_key_value_heads": Case("--num-key-value-heads 2", model="llama"),
    "qkv_bias": Case("--no-qkv-bias", model="llama"),
    "qk_norm": Case("--no-qk-norm", model="llama"),
    "sliding_window": Case("--sliding-window 4", model="llama"),
    "rope_theta": Case("--rope-theta 100", model="llama"),
    "rotary_percent": Case("--rotary-percent 0.5", model="llama"),
    "rope_scaling": Case("--rope-scaling linear", model="llama", in_ci=True),
    "rope_scaling_factor": Case("--rope-scaling-factor 4", "--rope-scaling linear", "llama"),
    "rope_original_length": Case("--rope-original-length 16", LLAMA3, "llama"),
    "rope_low_freq_factor": Case("--rope-low-freq-factor 0.1", LLAMA3, "llama"),
    "rope_high_freq_factor": Case("--rope-high-freq-factor 1.5", LLAMA3, "llama"),
    "rope_beta_fast": Case("--rope-beta-fast 200", YARN, "llama"),
    "rope_beta_slow": Case("--rope-beta-slow 0.01", YARN, "llama"),
    "rope_attention_factor": Case("--rope-attention-factor 3", YARN, "llama"),
    # model
    "num_layers": Case("--num-layers 2"),
    "hidden_size": Case("--hidden-size 32"),
    "num_attention_heads": Case("--num-attention-heads 2"),
    "kv_hidden_size": Case("--kv-hidden-size 8"),
    "num_decoder_layers": Case("--num-decoder-layers 1", model="t5-cpm"),
    "normalization": Case("--normalization rmsnorm"),
    "activation": Case("--activation relu"),
    "position_embedding": Case("--position-embedding relative", model="t5-cpm"),
    "relative_attention_num_buckets": Case("--relative-attention-num-buckets 16", model="t5-v1.1"),
    "relative_attention_max_distance": Case("--relative-attention-max-distance 9", model="t5-v1.1"),
    "relative_attention_per_layer": Case("--relative-attention-per-layer", model="t5-v1.1"),
    "scale_attention": Case("--no-scale-attention"),
    "tie_embeddings": Case("--no-tie-embeddings"),
    "scale_tied_logits": Case("--scale-tied-logits", model="t5-cpm"),
    "ff_hidden_size": Case("--ff-hidden-size 8"),
    "hidden_bias": Case("--no-hidden-bias"),
    "max_position_embeddings": Case("--max-position-embeddings 40"),
    "vocab_size": Case("--vocab-size 3100"),
    "make_vocab_size_divisible_by": Case("--make-vocab-size-divisible-by 1000"),
    "hidden_dropout": Case("--hidden-dropout 0.3"),
    "attention_dropout": Case("--attention-dropout 0.3"),
    "checkpoint_attention": Case("--checkpoint-attention"),
    "recompute_modules": Case("--recompute-modules norm"),
    "offload_activations": Case("--offload-activations"),
    "logits_chunk_size": Case("--logits-chunk-size 8"),
    "reference_ops": Case("--reference-ops swiglu", in_ci=True),
    "layernorm_epsilon": Case("--layernorm-epsilon 0.1"),
    "init_method_std": Case("--init-method-std 0.5"),
    "mup_base_hidden_size": Case(WIDE),
    "mup_base_kv_hidden_size": Case("--mup-base-kv-hidden-size 2", WIDE),
    "mup_base_ff_hidden_size": Case("--mup-base-ff-hidden-size 16", WIDE),
    "mup_base_expert_ff_hidden_size": Case("--mup-base-expert-ff-hidden-size 16", f"{WIDE} {EXPERTS}"),
    "mup_base_num_key_value_heads": Case(
        "--mup-base-num-key-value-heads 2", f"{WIDE} {MUON} --num-key-value-heads 2", "llama"
    ),
    "mup_base_num_decoder_layers": Case("--mup-base-num-decoder-layers 1", WIDE, "t5-cpm"),
    "mup_base_num_layers": Case("--mup-base-num-layers 2", WIDE),
    # layout
    "model_parallel_size": Case("--model-parallel-size 2", ranks=2),
    "sequence_parallel": Case("--sequence-parallel", "--model-parallel-size 2", ranks=2),
    "async_tensor_model_parallel_allreduce": Case(
        "--no-async-tensor-model-parallel-allreduce", "--model-parallel-size 2", ranks=2
    ),
    "context_parallel_size": Case("--context-parallel-size 2", ranks=2),
    "expert_parallel_size": Case("--expert-parallel-size 2", EXPERTS, ranks=2),
    "pipe_parallel_size": Case("--pipe-parallel-size 1", in_ci=True),
    "partition_method": Case("--partition-method 0,4", PIPE, ranks=2),
    "pipeline_schedule": Case("--pipeline-schedule gpipe", PIPE, ranks=2),
    "virtual_pipeline_size": Case(
        "--virtual-pipeline-size 3",
        f"{PIPE} --num-layers 6 --pipeline-schedule interleaved --virtual-pipeline-size 2",
        ranks=2,
    ),
    "pipeline_extra_warmup": Case("--pipeline-extra-warmup 2", PIPE, ranks=2),
    "pipeline_timeout": Case("--pipeline-timeout 50", PIPE, ranks=2),
    "zero_stage": Case("--zero-stage 1"),
    "overlap_grad_reduce": Case("--no-overlap-grad-reduce", "--zero-stage 1", in_ci=True),
    "checkpoint_activations": Case("--checkpoint-activations"),
    "checkpoint_num_layers": Case("--checkpoint-num-layers 2", "--checkpoint-activations"),
    "distributed_timeout_minutes": Case("--distributed-timeout-minutes 2", ranks=2),
    # data
    "data_path": Case("--data-path {here}/other", "--data-path {here}/tiny"),
    "data_stages": Case("--data-stages '0: {here}/tiny; 2: {here}/other'", "--data-path {here}/tiny"),
    "train_data_path": Case("--train-data-path {here}/other", "--train-data-path {here}/tiny"),
    "valid_data_path": Case("--valid-data-path {here}/other", "--train-data-path {here}/tiny --eval-iters 1"),
    "test_data_path": Case("--test-data-path {here}/other", "--train-data-path {here}/tiny --eval-iters 1"),
    "split": Case("--split 5,5,0"),
    "tokenizer_type": Case("--tokenizer-type cpm"),
    "seq_length": Case("--seq-length 16"),
    "enc_seq_length": Case("--enc-seq-length 24", model="t5-cpm"),
    "dec_seq_length": Case("--dec-seq-length 6", model="t5-cpm"),
    "objective": Case("--objective prefix-lm"),
    "span_convention": Case("--span-convention cpm", model="t5-v1.1"),
    "noise_density": Case("--noise-density 0.4", model="t5-v1.1"),
    "mean_span_length": Case("--mean-span-length 6", model="t5-v1.1"),
    "num_sentinels": Case("--num-sentinels 50", model="t5-v1.1"),
    "fim_rate": Case("--fim-rate 0.5", FIM),
    "fim_spm_rate": Case("--fim-spm-rate 1", FIM),
    "fim_tokens": Case("--fim-tokens <c> <b> <a>", FIM),
    "reset_position_ids": Case("--reset-position-ids", "--batch-size 8"),
    "reset_attention_mask": Case("--reset-attention-mask", "--batch-size 8"),
    "eod_mask_loss": Case("--eod-mask-loss", "--batch-size 8"),
    "num_workers": Case("--num-workers 1"),
    # batches and iterations
    "batch_size": Case("--batch-size 3"),
    "gas": Case("--gas 2"),
    "batch_size_schedule": Case("--batch-size-schedule '0:2 4_samples:4'"),
    "train_iters": Case("--train-iters 2"),
    "train_samples": Case("--train-samples 4"),
    "eval_interval": Case("--eval-interval 1", EVALUATES),
    "eval_iters": Case("--eval-iters 2", EVALUATES),
    "eval_tasks": Case("--eval-tasks {here}/cloze.jsonl"),
    "eval_tasks_interval": Case("--eval-tasks-interval 1", "--eval-tasks {here}/cloze.jsonl"),
    "eval_tasks_limit": Case("--eval-tasks-limit 1", "--eval-tasks {here}/cloze.jsonl"),
    "sample_prompt": Case("--sample-prompt x"),
    "sample_interval": Case("--sample-interval 1", "--sample-prompt x --sample-interval 0"),
    "sample_tokens": Case("--sample-tokens 1", "--sample-prompt x"),
    "sample_temperature": Case("--sample-temperature 0", "--sample-prompt x"),
    "z_loss": Case("--z-loss 0.1"),
    "seed": Case("--seed 5"),
    "precision": Case("--precision fp64"),
    "max_skipped_steps": Case("--max-skipped-steps 1", "--lr 1e30 --train-iters 5"),
    "skip_step_sigma": Case(
        "--skip-step-sigma 0.001", "--skip-step-window 4 --skip-step-sigma 9 --train-iters 6 --lr 0.1"
    ),
    "skip_step_window": Case("--skip-step-window 4", "--skip-step-sigma 0.001 --train-iters 6 --lr 0.1"),
    "skip_iterations": Case("--skip-iterations 2"),
    "skip_samples": Case("--skip-samples 3"),
    "check_replicas": Case("--check-replicas 1", "--train-iters 4", ranks=2),
    "manual_gc_interval": Case("--manual-gc-interval 1"),
    "flash_attention_impl": Case("--flash-attention-impl FA3"),
    "cpu_matmul": Case("--cpu-matmul onednn", "--cpu-matmul torch"),
    "keep_freed_memory": Case("--no-keep-freed-memory"),
    "deepspeed_config": Case("--deepspeed-config {here}/ds_config.json"),
    # optimizer
    "optimizer": Case("--optimizer sgd"),
    "lr": Case("--lr 1e-2"),
    "min_lr": Case("--min-lr 1e-4", DECAY),
    "lr_decay_style": Case("--lr-decay-style linear"),
    "lr_decay_iters": Case("--lr-decay-iters 9", DECAY),
    "lr_decay_samples": Case("--lr-decay-samples 9", DECAY),
    "lr_wsd_decay_iters": Case("--lr-wsd-decay-iters 2", WSD),
    "lr_wsd_decay_samples": Case("--lr-wsd-decay-samples 6", "--lr-decay-style wsd --train-samples 16"),
    "lr_wsd_decay_style": Case("--lr-wsd-decay-style cosine", WSD),
    "warmup": Case("--warmup 1"),
    "override_lr_schedule": Case("--override-lr-schedule", f"{LOADS} --lr 5e-3"),
    "weight_decay": Case("--weight-decay 0.5"),
    "embedding_weight_decay": Case("--no-embedding-weight-decay"),
    "param_groups": Case("--param-groups {here}/groups.json"),
    "clip_grad": Case("--clip-grad 0.01"),
    "adam_beta1": Case("--adam-beta1 0.5"),
    "adam_beta2": Case("--adam-beta2 0.5"),
    "adam_eps": Case("--adam-eps 1", in_ci=True),
    "exp_avg_dtype": Case("--exp-avg-dtype bf16"),
    "exp_avg_sq_dtype": Case("--exp-avg-sq-dtype bf16", "--adam-beta2 0.95"),
    "muon_momentum": Case("--muon-momentum 0.5", MUON),
    "muon_nesterov": Case("--no-muon-nesterov", MUON),
    "muon_ns_steps": Case("--muon-ns-steps 2", MUON),
    "muon_ns_dtype": Case("--muon-ns-dtype bf16", MUON),
    "muon_adjust_lr_fn": Case("--muon-adjust-lr-fn original", MUON),
    "muon_lr_factor": Case("--muon-lr-factor 0.5", MUON),
    "ema_decay": Case("--ema-decay 0.9"),
    # checkpoints
    "save": Case("--save {here}/elsewhere"),
    "load": Case("--load {here}/before"),
    "exit_on_missing_checkpoint": Case("--exit-on-missing-checkpoint"),
    "finetune": Case("--finetune", LOADS),
    "load_optim": Case("--no-load-optim", LOADS),
    "load_rng": Case("--no-load-rng", f"{LOADS} --seed 5 --override-data"),
    "override_data": Case("--override-data", f"{LOADS} --seed 5"),
    "async_save": Case("--async-save"),
    "save_interval": Case("--save-interval 1"),
    "save_at_end": Case("--no-save-at-end"),
    "keep_last": Case("--keep-last 1", SAVES),
    "keep_every": Case("--keep-every 2", f"{SAVES} --keep-last 1"),
    "exit_duration_in_mins": Case("--exit-duration-in-mins 0"),
    "exit_interval": Case("--exit-interval 2"),
    # logs
    "run_dir": Case("--run-dir {here}/another"),
    "log_interval": Case("--log-interval 2"),
    "log_details": Case("--log-details"),
    "log_layers": Case("--log-layers", in_ci=True),
    "tensorboard": Case("--tensorboard", in_ci=True),
    "tensorboard_dir": Case("--tensorboard-dir {here}/board", "--tensorboard"),
    "wandb": Case("--wandb"),
    "swanlab": Case("--swanlab"),
    "mlflow": Case("--mlflow"),
    "trace": Case("--trace"),
    "trace_iterations": Case("--trace-iterations 2", "--trace"),
    "profile": Case("--profile --profile-iterations 2"),
    "profile_iterations": Case("--profile-iterations 2-3", "--profile --profile-iterations 2"),
}
# Setting -> (reason why no short run shows its effect, test that shows it, word in that test).
ELSEWHERE = {
    "family": ("each entry script sets it and refuses another one", "tests/unit/test_config.py", "--family"),
    "vocab_file": ("no run trains without it", "tests/parity/test_corpus_losses.py", "vocab_file"),
    "kernels": ("auto means torch where apex is not installed", "tests/unit/test_kernels.py", "kernels"),
    "startup_timeout_minutes": (
        "only a rank that does not start shows it", "tests/ranks/test_initialize.py", "--startup-timeout-minutes"
    ),
    "override_tokenizer": (
        "needs a second tokenizer of one size", "tests/checkpoints/test_load_flags.py", "--override-tokenizer"
    ),
    "overlap_param_gather": ("changes speed only", "tests/ranks/test_overlap_gather.py", "--overlap-param-gather"),
    "max_failed_saves": ("needs a disk that fails", "tests/unit/test_failing_outputs.py", "RetryingSaver"),
    "compile": ("compilers skip layers while operations are counted", "tests/unit/test_compile_default.py", "compile"),
    "dry_run": ("it ends the run before its first step", "tests/ranks/test_dry_run.py", "--dry-run"),
    "override_lock": ("needs the lock of another machine", "tests/unit/test_run_lock.py", "override"),
}  # fmt: skip
# Flags beside other flags under which they have no effect: each gets a note.
IDLE = (
    ("gpt2", "--adam-beta1 0.8 --optimizer sgd"),
    ("gpt2", "--adam-beta2 0.8 --optimizer sgd"),
    ("gpt2", "--adam-eps 1 --optimizer sgd"),
    ("gpt2", "--min-lr 1e-5 --lr-decay-style constant"),
    ("gpt2", "--lr-decay-iters 7 --lr-decay-style constant --warmup 0"),
    ("gpt2", "--lr-decay-samples 7 --lr-decay-style constant --warmup 0"),
    ("gpt2", "--lr-wsd-decay-iters 7"),
    ("gpt2", "--lr-wsd-decay-samples 7"),
    ("gpt2", "--lr-wsd-decay-style linear --lr-decay-style linear"),
    ("gpt2", "--no-embedding-weight-decay --weight-decay 0"),
    ("gpt2", "--gas 3 --batch-size-schedule 0:8"),
    ("gpt2", "--train-iters 3 --train-samples 80"),
    ("gpt2", "--eval-interval 5 --eval-iters 0"),
    ("gpt2", "--valid-data-path v --train-data-path t --eval-iters 0"),
    ("gpt2", "--test-data-path v --train-data-path t --eval-iters 0"),
    ("gpt2", "--check-replicas 5"),
    ("gpt2", "--split 9,1,0 --train-data-path t"),
    ("gpt2", "--split 9,1,0 --data-stages '0: t' --valid-data-path v"),
    ("gpt2", "--reset-position-ids --objective sft"),
    ("gpt2", "--reset-attention-mask --objective sft"),
    ("t5", "--noise-density 0.3 --objective prefix-lm"),
    ("t5", "--mean-span-length 5 --objective prefix-lm"),
    ("t5", "--seq-length 256"),
    ("t5", "--seq-length 600 --max-position-embeddings 700"),
    ("t5", "--relative-attention-num-buckets 16"),
    ("t5", "--relative-attention-max-distance 64"),
    ("llama", "--rope-scaling linear"),
    ("llama", "--rope-original-length 64 --rope-scaling llama3"),
    ("llama", "--rope-low-freq-factor 2 --rope-scaling llama3 --rope-original-length 64"),
    ("llama", "--rope-high-freq-factor 2 --rope-scaling llama3 --rope-original-length 64"),
    ("llama", "--rope-beta-fast 9 --rope-scaling yarn --rope-original-length 64"),
    ("llama", "--rope-beta-slow 2 --rope-scaling yarn --rope-original-length 64"),
    ("gpt2", "--logits-chunk-size 8 --reference-ops cross-entropy"),
    ("gpt2", "--reference-ops rope swiglu"),
    ("llama", "--router-aux-loss 0.1 --num-experts 4 --router-balance bias"),
    ("llama", "--router-bias-rate 0.1 --num-experts 4"),
    ("llama", "--mup-base-num-key-value-heads 1 --mup-base-hidden-size 8"),
    ("gpt2", "--pipeline-schedule gpipe"),
    ("gpt2", "--virtual-pipeline-size 2 --pipeline-schedule interleaved"),
    ("gpt2", "--pipeline-timeout 9"),
    ("gpt2", "--partition-method uniform"),
    ("gpt2", "--pipeline-extra-warmup 1 --pipe-parallel-size 1"),
    ("gpt2", "--sequence-parallel"),
    ("gpt2", "--no-async-tensor-model-parallel-allreduce"),
    ("gpt2", "--checkpoint-num-layers 2"),
    ("gpt2", "--no-overlap-grad-reduce --zero-stage 2"),
    ("gpt2", "--exit-on-missing-checkpoint"),
    ("gpt2", "--no-load-optim --finetune --load x"),
    ("gpt2", "--no-load-rng --finetune --load x"),
)

FP16 = {"enabled": True}
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
# Content of a ds_config and the same content with a further key, which has an effect or a note.
DS_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient_clipping": ({}, {"gradient_clipping": 0.01}),
    "steps_per_print": ({}, {"steps_per_print": 2}),
    "gradient_accumulation_steps": ({}, {"gradient_accumulation_steps": 7}),
    "train_batch_size": ({}, {"train_batch_size": 70}),
    "train_micro_batch_size_per_gpu": ({}, {"train_micro_batch_size_per_gpu": 70}),
    "wall_clock_breakdown": ({}, {"wall_clock_breakdown": True}),
    "communication_data_type": ({}, {"communication_data_type": "fp16"}),
    "prescale_gradients": ({}, {"prescale_gradients": True}),
    "gradient_predivide_factor": ({}, {"gradient_predivide_factor": 2.0}),
    "dump_state": ({}, {"dump_state": True}),
    "memory_breakdown": ({}, {"memory_breakdown": True}),
    "flops_profiler": ({}, {"flops_profiler": {"enabled": True, "profile_step": 2}}),
    "comms_logger": ({}, {"comms_logger": {"enabled": True}}),
    "csv_monitor": ({}, {"csv_monitor": {"enabled": True, "output_path": "HERE/csv"}}),
    "tensorboard": ({}, {"tensorboard": {"enabled": True, "output_path": "HERE/board"}}),
    "wandb": ({}, {"wandb": {"enabled": True}}),
    "zero_allow_untested_optimizer": (
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": False},
    ),
    "zero_force_ds_cpu_optimizer": (
        {"zero_optimization": OFFLOAD}, {"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": True}
    ),
    "fp16": ({}, {"fp16": FP16}),
    "bf16": ({}, {"bf16": FP16}),
    "zero_optimization": ({}, {"zero_optimization": {"stage": 2}}),
}  # fmt: skip
for _key, _value in {
    "auto_cast": True, "loss_scale": 128, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1,
    "consecutive_hysteresis": True, "min_loss_scale": 4, "fp16_master_weights_and_grads": True,
}.items():  # fmt: skip
    DS_CONFIGS[f"fp16.{_key}"] = ({"fp16": FP16}, {"fp16": {**FP16, _key: _value}})
for _key in ("immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
    _off = _key in ("check_grad_overflow", "immediate_grad_update")
    _base = {"bf16": FP16, "zero_optimization": {"stage": 1, "allgather_bucket_size": 1000000}}
    DS_CONFIGS[f"bf16.{_key}"] = (_base, {**_base, "bf16": {**FP16, _key: not _off}})
