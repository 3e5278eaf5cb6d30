"""Table of every name of DeepSpeed that this package imports, reads, calls, overrides or patches, grouped by class.

At run time, `_deepspeed.missing_names` compares this table with the installed release. tests/unit/test_contract.py
compares the table with the release and with this package's code; run that test to review a new release of DeepSpeed.
"""

from collections import defaultdict
from typing import NamedTuple

# Each block begins with a class or module (`module:Class`) and what tds needs it for. Then come its names, by kind:
#   uses       names that the class or module itself defines
#   fields     attributes that an instance has once it is built
#   overrides  methods that a subclass in tds overrides
#   patches    names that are replaced in DeepSpeed's own class, module or instance
TABLE = """
deepspeed.runtime.engine:DeepSpeedEngine  reading the settings of a run
    uses      bfloat16_enabled fp16_enabled gradient_accumulation_steps gradient_clipping optimizer_name
    uses      optimizer_params steps_per_print train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown
    uses      zero_allow_untested_optimizer zero_cpu_offload zero_optimization zero_optimization_stage
    fields    _config gradient_average mpu

deepspeed.runtime.engine:DeepSpeedEngine  the training step
    uses      backward destroy scale step
    fields    device dp_world_size enable_backward_allreduce global_rank global_samples global_steps micro_steps module
    fields    monitor seq_data_parallel_group skipped_steps timers tput_timer
    overrides _broadcast_model _configure_distributed_model set_train_batch_size

deepspeed.runtime.engine:DeepSpeedEngine  the optimizer step and checkpoints
    uses      load_universal_checkpoint
    fields    _global_grad_norm basic_optimizer lr_scheduler optimizer
    overrides _configure_optimizer _take_model_step buffered_allreduce_fallback clip_fp32_gradients
    overrides load_checkpoint module_state_dict save_checkpoint
    patches   _configure_basic_optimizer

deepspeed.runtime.pipe.engine:PipelineEngine  the training step of a pipeline
    uses      _next_batch is_last_stage set_batch_fn set_dataiterator
    fields    agg_additional_losses agg_train_loss data_iterator dp_group_loss dynamic_shape fwd_outputs grid loss
    fields    micro_batches num_stages outputs stage_id total_loss
    overrides eval_batch train_batch

deepspeed.runtime.pipe.engine:PipelineEngine  the gradients and the optimizer step of a pipeline
    uses      _bf16_reduce_grads _exec_optimizer_step _exec_reduce_grads is_gradient_accumulation_boundary
    fields    _force_grad_boundary pipeline_enable_backward_allreduce using_bf16_optimizer

deepspeed.runtime.config:DeepSpeedConfig  reading the ds_config
    fields    _param_dict bfloat16_config communication_data_type float16_config gradient_predivide_factor
    fields    optimizer_name optimizer_params pipeline prescale_gradients torch_autocast_dtype torch_autocast_enabled
    fields    wall_clock_breakdown zero_config zero_force_ds_cpu_optimizer zero_optimization_stage

deepspeed.utils.timer:SynchronizedWallClockTimer.Timer  timing the training step
    uses      elapsed reset start stop
    fields    event_timers

deepspeed.utils.timer:ThroughputTimer  not waiting for the device in each micro-batch
    fields    config

deepspeed.monitor.monitor:MonitorMaster  reporting losses
    uses      write_events
    fields    enabled

deepspeed.runtime.pipe.module:PipelineModule  building the layers of a stage
    uses      _count_layer_params _find_layer_type _set_bounds
    fields    _layer_specs _local_start _local_stop _topo global_rank num_stages parts stage_id
    overrides _build _index_tied_modules _partition_layers ckpt_layer_path ckpt_layer_path_list stage_owner
    patches   _build

deepspeed.runtime.pipe.module:PipelineModule  running the layers of a stage
    uses      _is_checkpointable get_additional_losses
    fields    activation_checkpoint_func activation_checkpoint_interval base_seed forward_funcs fwd_map loss_fn
    fields    micro_offset seed_fn seed_layers

deepspeed.runtime.pipe.module:PipelineModule  tied weights
    uses      _recursive_getattr
    fields    tied_comms tied_modules
    patches   _synchronize_tied_weights

deepspeed.runtime.pipe.module:TiedLayerSpec  building the layers of a stage
    uses      build
    fields    forward_fn key module_args module_kwargs

deepspeed.runtime.pipe.topology:PipelineParallelGrid  the process groups of a rank
    uses      get_data_parallel_group get_data_parallel_rank get_global_rank get_model_parallel_group
    uses      get_pipe_parallel_group get_pipe_parallel_world_size get_slice_parallel_group
    uses      get_slice_parallel_rank get_slice_parallel_world_size get_stage_id stage_to_global
    fields    _topo pipe_parallel_size

deepspeed.runtime.pipe.topology:ProcessTopology  the process groups of a rank
    uses      get_axis_comm_lists get_axis_names get_coord get_dim get_rank

deepspeed.runtime.bf16_optimizer:BF16_Optimizer  training in bf16
    uses      _lazy_init_hp_params_optimizer_state clear_lp_grads update_hp_grads
    fields    _global_grad_norm _hp_optimizer_states_linked bf16_groups bf16_groups_flat fp32_groups_flat_partition
    fields    fp32_groups_gradients
    fields    fp32_groups_has_gradients immediate_grad_update optimizer
    patches   get_grads_for_norm

deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer  training with ZeRO-1 or ZeRO-2
    uses      _lazy_init_hp_params_optimizer_state _update_scale
    fields    _global_grad_norm _hp_optimizer_states_linked averaged_gradients bit16_groups bit16_groups_flat
    fields    check_grad_overflow cur_scale loss_scaler optimizer overflow single_partition_of_fp32_groups
    fields    use_grad_accum_attribute
    patches   step

deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3  training with ZeRO-3
    uses      _update_scale check_overflow get_param_id
    fields    _global_grad_norm cur_scale fp16_groups fp32_partitioned_groups_flat grad_position loss_scaler optimizer
    fields    overflow
    patches   _get_norm_groups step

deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer  training in fp16
    uses      refresh_fp32_params
    fields    fp16_groups fp16_groups_flat
    patches   initialize_optimizer_states step

deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer  the first step of Adam in half precision
    uses      refresh_fp32_params
    patches   initialize_optimizer_states step

deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler  the loss scale of fp16
    fields    cur_hysteresis cur_iter cur_scale dynamic last_overflow_iter min_scale raise_error_at_min_scale

deepspeed.utils.groups  training experts of DeepSpeed's MoE
    uses      _get_expert_data_parallel_group

deepspeed.runtime.zero.utils  tds.DistributedOptimizer
    uses      is_zero_supported_optimizer

deepspeed.runtime.zero  training with ZeRO-3
    uses      GatheredParameters Init

deepspeed.utils  reading and writing optimizer states in checkpoints
    uses      lazy_init_hp_params_optimizer_state link_hp_params safe_get_full_fp32_param
    uses      safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_optimizer_state

deepspeed  tds.initialize
    uses      DeepSpeedConfig __version__ accelerator checkpointing comm init_distributed initialize utils zero
    patches   DeepSpeedEngine PipelineEngine

deepspeed.accelerator  finding the device
    uses      get_accelerator

deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator  training on a device
    uses      communication_backend_name device_name
    patches   is_fp16_supported supported_dtypes

deepspeed.comm  sharing the process groups of an axis
    patches   new_group

deepspeed.comm.torch  starting on a CPU without a compiler
    patches   build_shm_op

deepspeed.runtime.activation_checkpointing.checkpointing  activation checkpointing
    uses      checkpoint non_reentrant_checkpoint reset
    patches   _CUDA_RNG_STATE_TRACKER

deepspeed.runtime.torch_autocast  torch_autocast of the ds_config
    uses      autocast_if_enabled

deepspeed.comm.config  checking the ds_config
    uses      CommsLoggerConfig

deepspeed.monitor.config  checking the ds_config
    uses      CSVConfig TensorBoardConfig WandbConfig

deepspeed.runtime.precision_config  checking the ds_config
    uses      DeepSpeedBF16Config DeepSpeedFP16Config

deepspeed.runtime.zero.config  checking the ds_config
    uses      DeepSpeedZeroConfig

deepspeed.pipe  importing tds
    uses      LayerSpec TiedLayerSpec

deepspeed.runtime.base_optimizer  importing tds
    uses      DeepSpeedOptimizer

deepspeed.runtime.bf16_optimizer  importing tds
    uses      BF16_Optimizer

deepspeed.runtime.engine  importing tds
    uses      DeepSpeedEngine

deepspeed.runtime.fp16.fused_optimizer  importing tds
    uses      FP16_Optimizer

deepspeed.runtime.fp16.unfused_optimizer  importing tds
    uses      FP16_UnfusedOptimizer

deepspeed.runtime.pipe.engine  importing tds
    uses      PipelineEngine TRAIN_BATCH_TIMER

deepspeed.runtime.pipe.module  importing tds
    uses      PipelineModule

deepspeed.runtime.utils  importing tds
    uses      partition_balanced partition_uniform set_random_seed

deepspeed.runtime.zero.stage3  importing tds
    uses      DeepSpeedZeroOptimizer_Stage3

deepspeed.runtime.zero.stage_1_and_2  importing tds
    uses      DeepSpeedZeroOptimizer
"""

# Attributes of weights that DeepSpeed sets and reads.
OF_PARAMETERS = (
    "_hp_mapping allreduce ds_id ds_numel ds_pipe_replicated ds_process_group ds_tensor group_name model_parallel "
    "tensor_model_parallel"
)

# Attributes and methods of a DistributedOptimizer that DeepSpeed's engines read and call.
OF_OPTIMIZERS = """
_global_grad_norm _lazy_init_hp_params_optimizer_state _restore_from_bit16_weights bf16_groups
dp_process_group fp16_groups load_state_dict overflow param_groups refresh_fp32_params
set_gradient_accumulation_boundary state_dict step zero_grad
"""


class Names(NamedTuple):
    """One block of TABLE; each field from `uses` to `patches` is a string of names separated by spaces."""

    place: str
    purpose: str
    uses: str = ""
    fields: str = ""
    overrides: str = ""
    patches: str = ""


def _parse_block(text: str) -> Names:
    (place, purpose), *rows = (line.split(maxsplit=1) for line in text.splitlines())
    names: defaultdict[str, str] = defaultdict(str)
    for kind, row in rows:
        names[kind] += " " + row
    return Names(place, purpose, **names)


CONTRACT = [_parse_block(text) for text in TABLE.strip().split("\n\n")]
