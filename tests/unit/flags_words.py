"""Chinese texts of the tables in docs/migration_zh.md, keyed by the English texts in docs/migration.md."""

CHINESE = {
    # Notes on foreign flags that are translated to a flag of this project.
    "no pipeline is 1 in Megatron-LM and 0 in this project": "Megatron-LM 用 1 表示没有流水线，本项目用 0",
    "Megatron-LM counts iterations from 0, this project from 1": "Megatron-LM 的迭代从 0 数起，本项目从 1 数起",
    "Megatron-LM's fused GELU uses tanh, its unfused GELU erf": "Megatron-LM 融合的 GELU 用 tanh，不融合的用 erf",
    "--gas, computed from --batch-size and the number of replicas": "--gas，由 --batch-size 和副本数算出",
    "--pipeline-schedule interleaved "
    "--virtual-pipeline-size, computed from --num-layers": "--pipeline-schedule interleaved "
    "--virtual-pipeline-size，由 --num-layers 算出",
    "every run uses DeepSpeed": "每次运行都由 DeepSpeed 驱动",
    "no effect with --num-key-value-heads, else "
    "--num-key-value-heads 1": "有 --num-key-value-heads 时不起作用，否则为 --num-key-value-heads 1",
    "8/3 of --hidden-size, rounded down to a multiple of 64, as "
    "in Megatron-LM": "--hidden-size 的 8/3，向下取 64 的倍数，与 Megatron-LM 相同",
    "--qk-norm with --normalization rmsnorm, refused otherwise": "有 --normalization rmsnorm 时为 --qk-norm，否则拒绝",
    "use --position-embedding rope --rope-scaling yarn "
    "and its settings": "改用 --position-embedding rope --rope-scaling yarn，并给出它的各个数值",
    "see --position-embedding for the choices": "有哪几种见 --position-embedding",
    "no effect with --position-embedding rope, refused otherwise": "有 --position-embedding rope 时不起作用，否则拒绝",
    "--sliding-window N + 1, for N,0": "N,0 当作 --sliding-window N + 1",
    "always uniform: one input is kept for every --checkpoint-num-layers "
    "layers": "本来如此：每 --checkpoint-num-layers 层保留一个输入",
    "all layers are recomputed, --checkpoint-num-layers at a time": "所有层都会重算，--checkpoint-num-layers 是每次重算的层数",
    "always on with fp32, fp64, and bf16 up to ZeRO 1; refused "
    "otherwise": "用 fp32、fp64 或 ZeRO 1 以内的 bf16 时本来如此，不起作用；否则拒绝",
    "--train-iters, computed from the global batch size": "--train-iters，由全局批大小算出",
    "--lr-decay-iters, computed from the global batch size": "--lr-decay-iters，由全局批大小算出",
    "--warmup, as a fraction of the decay's iterations": "--warmup，由衰减的迭代次数算出",
    "--warmup, as a fraction of the decay's samples": "--warmup，由衰减的样本数算出",
    "no effect if 0.9, refused otherwise": "0.9 时不起作用，否则拒绝",
    "no effect if it is merges.txt next to --vocab-file, refused "
    "elsewhere": "是 --vocab-file 旁边的 merges.txt 时不起作用，在别处则拒绝",
    ".bin and .idx files are always memory-mapped": ".bin 和 .idx 总是用内存映射读取",
    "rebuild the corpus with tools/preprocess_data.py": "用 tools/preprocess_data.py 重新生成语料",
    "always on": "总是打开",
    "the sample order is always shuffled by --seed": "样本只有一种顺序，由 --seed 打乱",
    # Reasons why a flag has no effect.
    "DeepSpeed always does this": "DeepSpeed 本来就这样做",
    "on the CPU, the optimizer is always torch's implementation": "CPU 上的优化器本来就是 torch 的",
    "the device decides: NCCL between GPUs, gloo between CPUs": "由设备决定：GPU 之间用 NCCL，CPU 之间用 gloo",
    "--overlap-grad-reduce decides how replicas reduce gradients": "副本间怎样累加梯度，由 --overlap-grad-reduce 决定",
    "the loss is the same; every rank always sends only its slice of a message": "损失不变；每个进程各传消息的一份",
    "the loss is the same; attention is a fused kernel and "
    "--compile fuses the rest": "这里损失不变；torch 的注意力是一个核函数，其余可融合的由 --compile 融合",
    "freed memory stays in PyTorch's cache": "释放的内存留在进程里",
    "--manual-gc-interval decides when garbage is collected": "何时回收垃圾由 --manual-gc-interval 决定",
    "initial weights depend on --seed and the parameter names, not on the device": "初始权重在任何设备上都由 --seed 和参数名决定",
    "each model has one implementation": "每个模型只有一种写法",
    "--checkpoint-activations alone enables checkpointing": "只需要 --checkpoint-activations",
    "checkpointed inputs are not copied into one buffer": "保存的输入不会复制到一个连续的缓冲区",
    "synchronizing each layer would only slow the run down": "它只会让运行变慢",
    "attention kernels always accumulate in fp32": "注意力的核函数本来就用 fp32 累加",
    "always on without --override-lr-schedule": "没有 --override-lr-schedule 时本来如此",
    "pages of the files are loaded on demand": "文件在用到时才读",
    "checkpoints always contain the optimizer; --no-load-optim skips it on loading": "检查点总含优化器；读取时用 --no-load-optim 略去",
    "dropout depends on --seed and the iteration; no random generator state "
    "is saved": "dropout 由 --seed 和迭代次数决定，不保存随机数发生器",
    "metrics.jsonl and TensorBoard get every metric at "
    "each --log-interval": "metrics.jsonl 和 TensorBoard 每 --log-interval 次迭代得到全部数值",
    "SIGTERM always saves and ends the run": "SIGTERM 总会保存并结束运行",
    "--partition-method balanced takes embedding and loss into account": "--partition-method balanced 已计入词嵌入和损失",
    "the loss is the same; --zero-stage 1 gathers weights at the end of a step": "损失不变；--zero-stage 1 在一步结束时收集权重",
    "--async-tensor-model-parallel-allreduce overlaps this communication "
    "and is on by default": "重叠由 --async-tensor-model-parallel-allreduce 负责，默认打开",
    "context parallelism always all-gathers keys and values": "只有一种方式：收集键和值",
    "always on: the loss is the mean over all target tokens": "本来如此：损失是所有目标词元的均值",
    "always on: samples contain no attention masks": "本来如此：样本里没有掩码",
    "always on: --load without a checkpoint is an error": "本来如此：--load 找不到检查点就是错误",
    "checkpoints have a single format, which every parallel layout can read": "检查点只有一种格式，任何布局都能读",
    "metrics.jsonl has all timings": "已有的计时都在 metrics.jsonl 里",
    # Advice for refused flags.
    "the batch size is constant": "批大小自始至终不变",
    "--partition-method decides how layers are split into stages": "层在哪里切开由 --partition-method 决定",
    'write "zero_optimization": {"reduce_bucket_size": '
    "...} in --deepspeed-config": '在 --deepspeed-config 里写 "zero_optimization": {"reduce_bucket_size": ...}',
    'write "zero_optimization": '
    '{"allgather_bucket_size": ...} in --deepspeed-config': '在 --deepspeed-config 里写 "zero_optimization": '
    '{"allgather_bucket_size": ...}',
    'write "zero_optimization": {"offload_optimizer": '
    "...} in --deepspeed-config": '在 --deepspeed-config 里写 "zero_optimization": {"offload_optimizer": ...}',
    "process groups are created after all ranks have joined; leave this flag out": "进程到齐后才建立进程组；去掉它",
    "start the ranks with tools/launch.py, torchrun or deepspeed": "用 tools/launch.py、torchrun 或 deepspeed 启动各进程",
    "layers do not share weights": "层之间不共享权重",
    "there are no experts; all tokens share one MLP": "没有专家层；所有词元经过同一个 MLP",
    "norms come before attention and MLP (pre-LN)": "归一化在注意力和 MLP 之前",
    "there is no BERT model": "这里没有 BERT",
    "export to Hugging Face with "
    "tools/convert_checkpoint.py, and from there to ONNX": "tools/convert_checkpoint.py 导出为 Hugging Face 格式，由后者导出 ONNX",
    "weights are drawn from a normal distribution; see --init-method-std": "权重取正态分布，见 --init-method-std",
    "see --activation for the choices": "有哪几种见 --activation",
    "norm weights are stored unchanged, without subtracting 1": "归一化直接乘以它的权重",
    "--qk-norm always has a learned weight": "--qk-norm 带有权重",
    "rotary embeddings pair the two halves of a head, as in Hugging Face": "旋转的是一个头的前后两半，与 Hugging Face 相同",
    "all layers have one --sliding-window": "所有层用同一个 --sliding-window",
    "use --num-key-value-heads to shrink keys and values": "缩小键和值的是 --num-key-value-heads",
    "with --sequence-parallel each model-parallel rank stores only its "
    "slice of the checkpointed inputs": "用 --sequence-parallel，每个张量并行进程只保留所存输入的一段",
    '"wall_clock_breakdown": true in --deepspeed-config '
    "measures the backward pass": '在 --deepspeed-config 里写 "wall_clock_breakdown": true 可以测量',
    "use --offload-activations instead of "
    "--checkpoint-activations": "用 --offload-activations 代替 --checkpoint-activations",
    'write "fp16": {"loss_scale": ...} in --deepspeed-config': '在 --deepspeed-config 里写 "fp16": {"loss_scale": ...}',
    'write "fp16": {"initial_scale_power": ...} in '
    "--deepspeed-config": '在 --deepspeed-config 里写 "fp16": {"initial_scale_power": ...}',
    'write "fp16": {"min_loss_scale": ...} in '
    "--deepspeed-config": '在 --deepspeed-config 里写 "fp16": {"min_loss_scale": ...}',
    'write "fp16": {"loss_scale_window": ...} in '
    "--deepspeed-config": '在 --deepspeed-config 里写 "fp16": {"loss_scale_window": ...}',
    'write "fp16": {"hysteresis": ...} in --deepspeed-config': '在 --deepspeed-config 里写 "fp16": {"hysteresis": ...}',
    "the loss is computed in fp32": "损失用 fp32 计算",
    "hidden states have the dtype of --precision; for fp32 hidden states, pass "
    "--precision fp32": "隐藏状态用 --precision；要 fp32 就全部用 fp32",
    "--weight-decay is constant": "--weight-decay 自始至终不变",
    "all samples have the full length": "所有样本都是满的",
    "only the gradient norm is logged": "范数只记录梯度的",
    "on SIGTERM the run saves and exits; the same command resumes it": "SIGTERM 保存并结束运行，同一条命令继续",
    "there are no retrieval models": "这里没有检索",
    "use --zero-stage 3 to shard weights over replicas": "在副本间分摊权重的是 --zero-stage 3",
    "--offload-activations offloads the activations of all layers": "--offload-activations 搬走所有层的激活",
    "steps with a NaN or Inf gradient are always skipped": "梯度不是有限数的一步从不更新权重",
    "FP8 is not supported; see --precision for the choices": "不支持 FP8；有哪几种见 --precision",
    "warmup always starts from 0": "学习率从 0 升起",
    "give --data-path; to try a run, preprocess corpus/sample.jsonl": "给出 --data-path；试运行可用 corpus/sample.jsonl 预处理",
    "name corpora with --data-path, or with --train-data-path, "
    "--valid-data-path and --test-data-path": "语料由 --data-path、--train-data-path 等给出",
    "give the config.json of the checkpoint's run with --config": "用 --config 给出那次运行的 config.json",
    # Notes on keys of JSON files.
    "gated, as in Llama": "带门控，与 Llama 相同",
}
