"""Every name of DeepSpeed that this package imports, reads, calls, overrides or patches, by class, as data.

`_deepspeed.missing_names` compares it with the installed release at run time, tests/unit/test_contract.py with
this package's code and with the release. A new release is reviewed with `pytest tests/unit/test_contract.py`.
"""

from typing import NamedTuple


class Names(NamedTuple):
    """Names of one class or module, each field separated by spaces.

    place: `module` or `module:Class`.
    purpose: what does not work without these names, for messages.
    uses: names that the class or module itself has.
    fields: attributes that an instance has once it is built.
    overrides: methods that our subclass replaces.
    patches: names that are replaced in DeepSpeed's own class, module or instance.
    """

    place: str
    purpose: str
    uses: str = ""
    fields: str = ""
    overrides: str = ""
    patches: str = ""


ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
PIPELINE_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
GRID = "deepspeed.runtime.pipe.topology:PipelineParallelGrid"
TOPOLOGY = "deepspeed.runtime.pipe.topology:ProcessTopology"
CONFIG = "deepspeed.runtime.config:DeepSpeedConfig"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
ACCELERATOR = "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator"
CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"

CONTRACT = (
    # ------------------------------------------------------------------ engines
    Names(
        ENGINE,
        "reading the settings of a run",
        uses="bfloat16_enabled fp16_enabled gradient_accumulation_steps gradient_clipping optimizer_name optimizer_params "
        "steps_per_print train_batch_size wall_clock_breakdown zero_allow_untested_optimizer zero_cpu_offload "
        "zero_optimization zero_optimization_stage",
        fields="_config gradient_average mpu",
    ),
    Names(
        ENGINE,
        "the training step",
        uses="backward destroy scale step",
        fields="device dp_world_size enable_backward_allreduce global_rank global_samples global_steps module monitor "
        "seq_data_parallel_group timers tput_timer",
    ),
    Names(
        ENGINE,
        "the optimizer step and checkpoints",
        fields="_global_grad_norm basic_optimizer lr_scheduler optimizer torch_autocast_z0_gradscaler",
        overrides="_configure_optimizer _take_model_step buffered_allreduce_fallback clip_fp32_gradients load_checkpoint "
        "save_checkpoint",
        patches="_configure_basic_optimizer",
    ),
    Names(
        PIPELINE_ENGINE,
        "the training step of a pipeline",
        uses="_next_batch is_last_stage set_batch_fn set_dataiterator",
        fields="agg_additional_losses agg_train_loss data_iterator dynamic_shape fwd_outputs grid micro_batches num_stages "
        "outputs stage_id total_loss",
        overrides="eval_batch train_batch",
    ),
    Names(
        PIPELINE_ENGINE,
        "the gradients and the optimizer step of a pipeline",
        uses="_bf16_reduce_grads _exec_optimizer_step _exec_reduce_grads is_gradient_accumulation_boundary",
        fields="_force_grad_boundary pipeline_enable_backward_allreduce using_bf16_optimizer",
    ),
    Names(
        CONFIG,
        "reading the ds_config",
        fields="_param_dict bfloat16_config communication_data_type float16_config gradient_predivide_factor "
        "optimizer_params pipeline prescale_gradients torch_autocast_dtype torch_autocast_enabled "
        "zero_force_ds_cpu_optimizer zero_optimization_stage",
    ),
    Names(
        "deepspeed.utils.timer:SynchronizedWallClockTimer.Timer",
        "timing the training step",
        uses="elapsed reset start stop",
        fields="event_timers",
    ),
    Names("deepspeed.utils.timer:ThroughputTimer", "not waiting for the device in each micro-batch", fields="config"),
    Names("deepspeed.monitor.monitor:MonitorMaster", "reporting losses", "write_events", fields="enabled"),
    # ---------------------------------------------------------- pipeline modules
    Names(
        PIPELINE_MODULE,
        "building the layers of a stage",
        uses="_count_layer_params _find_layer_type _set_bounds",
        fields="_layer_specs _local_start _local_stop _topo global_rank num_stages parts stage_id",
        overrides="_build _partition_layers ckpt_layer_path ckpt_layer_path_list stage_owner",
        patches="_build",
    ),
    Names(
        PIPELINE_MODULE,
        "running the layers of a stage",
        uses="_is_checkpointable get_additional_losses",
        fields="activation_checkpoint_func activation_checkpoint_interval forward_funcs fwd_map loss_fn",
    ),
    Names(
        PIPELINE_MODULE,
        "tied weights",
        uses="_recursive_getattr",
        fields="tied_comms tied_modules",
        patches="_synchronize_tied_weights",
    ),
    Names(
        "deepspeed.runtime.pipe.module:TiedLayerSpec",
        "building the layers of a stage",
        uses="build",
        fields="forward_fn key module_args module_kwargs",
    ),
    Names(
        GRID,
        "the process groups of a rank",
        uses="get_data_parallel_group get_data_parallel_rank get_global_rank get_model_parallel_group "
        "get_pipe_parallel_group get_pipe_parallel_world_size get_slice_parallel_group get_slice_parallel_rank "
        "get_slice_parallel_world_size get_stage_id stage_to_global",
        fields="_topo pipe_parallel_size",
    ),
    Names(
        TOPOLOGY, "the process groups of a rank", uses="get_axis_comm_lists get_axis_names get_coord get_dim get_rank"
    ),
    # ---------------------------------------------------------------- optimizers
    Names(
        BF16,
        "training in bf16",
        uses="_lazy_init_hp_params_optimizer_state clear_lp_grads update_hp_grads",
        fields="_hp_optimizer_states_linked bf16_groups bf16_groups_flat fp32_groups_gradients fp32_groups_has_gradients "
        "immediate_grad_update optimizer",
        patches="get_grads_for_norm",
    ),
    Names(
        ZERO_1_2,
        "training with ZeRO-1 or ZeRO-2",
        uses="_lazy_init_hp_params_optimizer_state",
        fields="_hp_optimizer_states_linked bit16_groups bit16_groups_flat check_grad_overflow cur_scale loss_scaler "
        "optimizer overflow",
    ),
    Names(
        ZERO_3,
        "training with ZeRO-3",
        uses="check_overflow",
        fields="cur_scale fp32_partitioned_groups_flat loss_scaler optimizer overflow",
        patches="_get_norm_groups",
    ),
    Names(
        "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer",
        "training in fp16",
        fields="fp16_groups fp16_groups_flat",
    ),
    Names(
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
        "the loss scale of fp16",
        fields="cur_hysteresis cur_iter cur_scale dynamic last_overflow_iter min_scale raise_error_at_min_scale",
    ),
    Names("deepspeed.runtime.zero.utils", "tds.DistributedOptimizer", uses="is_zero_supported_optimizer"),
    Names("deepspeed.runtime.zero", "training with ZeRO-3", uses="GatheredParameters Init"),
    Names(
        "deepspeed.utils",
        "reading and writing optimizer states in checkpoints",
        uses="lazy_init_hp_params_optimizer_state link_hp_params safe_get_full_fp32_param safe_get_full_optimizer_state "
        "safe_set_full_fp32_param safe_set_full_optimizer_state",
    ),
    # ------------------------------------------------------------- device, config
    Names(
        "deepspeed",
        "tds.initialize",
        uses="DeepSpeedConfig __version__ accelerator checkpointing comm init_distributed initialize utils zero",
        patches="DeepSpeedEngine PipelineEngine",
    ),
    Names("deepspeed.accelerator", "finding the device", uses="get_accelerator"),
    Names(
        ACCELERATOR,
        "training on a device",
        uses="communication_backend_name device_name",
        patches="is_fp16_supported supported_dtypes",
    ),
    Names("deepspeed.comm", "sharing the process groups of an axis", patches="new_group"),
    Names("deepspeed.comm.torch", "starting on a CPU without a compiler", patches="build_shm_op"),
    Names(
        CHECKPOINTING,
        "activation checkpointing",
        uses="checkpoint non_reentrant_checkpoint reset",
        patches="_CUDA_RNG_STATE_TRACKER",
    ),
    Names("deepspeed.runtime.torch_autocast", "torch_autocast of the ds_config", uses="autocast_if_enabled"),
    Names("deepspeed.comm.config", "checking the ds_config", uses="CommsLoggerConfig"),
    Names("deepspeed.monitor.config", "checking the ds_config", uses="CSVConfig TensorBoardConfig WandbConfig"),
    Names(
        "deepspeed.runtime.precision_config", "checking the ds_config", uses="DeepSpeedBF16Config DeepSpeedFP16Config"
    ),
    Names("deepspeed.runtime.zero.config", "checking the ds_config", uses="DeepSpeedZeroConfig"),
)

# Attributes that DeepSpeed gives to weights, and reads on them.
OF_PARAMETERS = "_hp_mapping ds_id ds_pipe_replicated ds_process_group ds_tensor model_parallel tensor_model_parallel"

# What DeepSpeed's engines read and call on the optimizer that they are given, here a DistributedOptimizer.
OF_OPTIMIZERS = (
    "_global_grad_norm _lazy_init_hp_params_optimizer_state _restore_from_bit16_weights bf16_groups dp_process_group "
    "fp16_groups load_state_dict overflow param_groups refresh_fp32_params set_gradient_accumulation_boundary "
    "state_dict step zero_grad"
)

# What is imported with this package: module and names. If one is missing, the ImportError names it.
IMPORTS = """
deepspeed.pipe LayerSpec TiedLayerSpec
deepspeed.runtime precision_config
deepspeed.runtime.base_optimizer DeepSpeedOptimizer
deepspeed.runtime.bf16_optimizer BF16_Optimizer
deepspeed.runtime.engine DeepSpeedEngine
deepspeed.runtime.fp16.fused_optimizer FP16_Optimizer
deepspeed.runtime.fp16.unfused_optimizer FP16_UnfusedOptimizer
deepspeed.runtime.pipe.engine PipelineEngine TRAIN_BATCH_TIMER
deepspeed.runtime.pipe.module PipelineModule
deepspeed.runtime.utils partition_balanced partition_uniform
deepspeed.runtime.zero.stage3 DeepSpeedZeroOptimizer_Stage3
deepspeed.runtime.zero.stage_1_and_2 DeepSpeedZeroOptimizer
"""
