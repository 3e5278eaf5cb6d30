"""Chinese texts of the tables in docs/migration_zh.md, keyed by the English texts in docs/migration.md."""

CHINESE = {
    # Notes on foreign flags that are translated to a flag of this project.
    "size 1, which means no pipeline in Megatron-LM, becomes 0": "Megatron-LM 用 1 表示没有流水线，本项目用 0",
    "Megatron-LM counts iterations from 0, this project from 1": "Megatron-LM 的迭代从 0 数起，本项目从 1 数起",
    "Megatron-LM's fused GELU is the tanh form, its unfused GELU the erf form": "Megatron-LM 融合的 GELU 用 tanh，不融合的用 erf",
    "Megatron-LM's GELU is the tanh form only if it is fused with a bias": "Megatron-LM 的 GELU 只有与偏置融合时才用 tanh",
    "--gas, computed from --batch-size and the number of replicas": "--gas，由 --batch-size 和副本数算出",
    "--pipeline-schedule interleaved "
    "--virtual-pipeline-size, computed from --num-layers": "--pipeline-schedule interleaved "
    "--virtual-pipeline-size，由 --num-layers 算出",
    "every run uses DeepSpeed": "每次运行都由 DeepSpeed 驱动",
    "Megatron-LM's default is one group": "Megatron-LM 默认只有一组",
    "Megatron-LM needs group_query_attention, too": "Megatron-LM 还需要 group_query_attention",
    "in Megatron-LM, the learning rate of --train-iters follows samples, and --train-samples includes an incomplete last "
    "batch": "在 Megatron-LM 中，--train-iters 的学习率按样本数变化，--train-samples 包括最后不满的一批",
    "the MLP width is 8/3 of --hidden-size, rounded down to a multiple of 64, as in Megatron-LM": "--hidden-size 的 8/3，向下取 64 的倍数，与 Megatron-LM 相同",
    "--qk-norm if --normalization is rmsnorm, refused otherwise": "有 --normalization rmsnorm 时为 --qk-norm，否则拒绝",
    "use --position-embedding rope --rope-scaling yarn, and set yarn's other flags": "改用 --position-embedding rope --rope-scaling yarn，并给出它的各个数值",
    "this value is not supported; see --position-embedding for the supported values": "有哪几种见 --position-embedding",
    "refused if --position-embedding is learned, otherwise no effect": "--position-embedding 为 learned 时拒绝，否则不起作用",
    "--sliding-window N + 1 if the value is N,0, refused otherwise": "值为 N,0 时为 --sliding-window N + 1，否则拒绝",
    "recomputation is always uniform, with one stored input for every "
    "--checkpoint-num-layers layers": "本来如此：每 --checkpoint-num-layers 层保留一个输入",
    "recomputation always covers all layers, --checkpoint-num-layers at a time": "所有层都会重算，--checkpoint-num-layers 是每次重算的层数",
    "no effect in fp32, in fp64, and in bf16 with ZeRO 1; refused otherwise, and if --deepspeed-config reduces in 16 bits": "在 fp32、fp64 和使用 ZeRO 1 的 bf16 下本来如此，不起作用；否则，或者 --deepspeed-config 让归约用 16 位时，拒绝",
    "--batch-size-schedule, computed from the three numbers and the global batch size": "--batch-size-schedule，由这三个数和全局批大小算出",
    "--train-samples, computed from --seq-length": "--train-samples，由 --seq-length 算出",
    "--lr-decay-samples, computed from --seq-length": "--lr-decay-samples，由 --seq-length 算出",
    "--warmup, computed as a fraction of --lr-decay-iters": "--warmup，由衰减的迭代次数算出",
    "--warmup, computed as a fraction of --lr-decay-samples": "--warmup，由衰减的样本数算出",
    "the momentum of --optimizer sgd is always 0.9": "--optimizer sgd 的动量总是 0.9",
    "--muon-adjust-lr-fn original is the mode shape_scaling, and the default is 0.2 times spectral; --muon-lr-factor "
    "scales both, and the weight decay": "--muon-adjust-lr-fn original 即 shape_scaling，默认是 spectral 的 0.2 倍；--muon-lr-factor 缩放更新量和权重衰减",
    "no effect if equal to --weight-decay, refused otherwise": "与 --weight-decay 相等时不起作用，否则拒绝",
    "no effect if --vocab-file implies this file, refused otherwise": "是 --vocab-file 旁边会读取的文件时不起作用，否则拒绝",
    ".bin and .idx files are always memory-mapped": ".bin 和 .idx 总是用内存映射读取",
    "rebuild the corpus with tools/preprocess_data.py": "用 tools/preprocess_data.py 重新生成语料",
    "the data loader always reads samples in the order of the data set": "数据的读取方式本来如此",
    "the throughput is always logged": "吞吐量总会记录",
    "samples are always shuffled by --seed, not by the data loader": "样本只有一种顺序，由 --seed 打乱",
    # Reasons why a flag has no effect.
    "DeepSpeed always does this": "DeepSpeed 本来就这样做",
    "on CPUs, the optimizer is always torch's": "CPU 上的优化器本来就是 torch 的",
    "the device determines the backend, NCCL for GPUs and gloo for CPUs": "由设备决定：GPU 之间用 NCCL，CPU 之间用 gloo",
    "matmuls and their communication are separate kernels": "矩阵乘法与它们的通信是分开的内核",
    "--overlap-grad-reduce sets how replicas reduce gradients": "副本间怎样累加梯度，由 --overlap-grad-reduce 决定",
    "the flag does not change the loss; each rank always sends only its slice of a tensor": "损失不变；每个 rank 各传消息的一份",
    "the flag does not change the loss; attention is always one fused kernel, and --compile "
    "fuses other operations": "这里损失不变；torch 的注意力是一个内核，其余可融合的由 --compile 融合",
    "a run never releases the memory that torch's allocator caches": "运行不会释放 torch 分配器缓存的显存",
    "--manual-gc-interval sets when garbage is collected": "何时回收垃圾由 --manual-gc-interval 决定",
    "initial weights depend on --seed and the parameter names, not on the device": "初始权重在任何设备上都由 --seed 和参数名决定",
    "each model has one implementation": "每个模型只有一种写法",
    "--checkpoint-activations alone turns recomputation on": "只用 --checkpoint-activations 就会重算",
    "checkpointed inputs are not copied into one buffer": "保存的输入不会复制到一个连续的缓冲区",
    "the flag would only slow the run down": "它只会让运行变慢",
    "attention kernels accumulate in fp32; with dropout, a CPU rounds scores as Megatron-LM does": "注意力的内核本来就用 fp32 累加；带 dropout 时，CPU 像 Megatron-LM 一样舍入注意力分数",
    "a resumed run keeps its checkpoint's schedule unless --override-lr-schedule is given": "没有 --override-lr-schedule 时，续训总是沿用检查点的学习率计划",
    "the memory-mapped files are read on demand": "文件在用到时才读",
    "checkpoints always contain the optimizer state; --no-load-optim ignores it when loading": "检查点总含优化器；读取时用 --no-load-optim 略去",
    "dropout depends only on --seed and the iteration, so checkpoints contain no random state": "dropout 由 --seed 和迭代次数决定，不保存随机数发生器",
    "metrics.jsonl and TensorBoard get all metrics every --log-interval iterations": "metrics.jsonl 和 TensorBoard 每 --log-interval 次迭代得到全部数值",
    "on SIGTERM, a run always saves a checkpoint and ends": "SIGTERM 总会保存并结束运行",
    "--partition-method balanced always counts the work of the embedding and the loss": "--partition-method balanced 已计入词嵌入和损失",
    "--exp-avg-dtype and --exp-avg-sq-dtype need no other flag": "`--exp-avg-dtype` 和 `--exp-avg-sq-dtype` 不需要其他参数",
    "context parallelism always all-gathers keys and values": "只有一种方式：收集键和值",
    "the loss is always the mean over all target tokens": "本来如此：损失是所有目标词元的均值",
    "samples never contain attention masks": "本来如此：样本里没有掩码",
    "checkpoints have only one format, which every layout can load": "检查点只有一种格式，任何并行策略都能读",
    '"wall_clock_breakdown": true in --deepspeed-config adds timings to the log and to '
    "metrics.jsonl": '在 --deepspeed-config 里写 "wall_clock_breakdown": true，日志和 metrics.jsonl 就有计时',
    # Advice for refused flags.
    "--partition-method sets how layers are split into stages": "层在哪里切开由 --partition-method 决定",
    'write "zero_optimization": {"reduce_bucket_size": '
    "...} in --deepspeed-config": '在 --deepspeed-config 里写 "zero_optimization": {"reduce_bucket_size": ...}',
    'write "zero_optimization": '
    '{"allgather_bucket_size": ...} in --deepspeed-config': '在 --deepspeed-config 里写 "zero_optimization": '
    '{"allgather_bucket_size": ...}',
    'write "zero_optimization": {"offload_optimizer": '
    "...} in --deepspeed-config": '在 --deepspeed-config 里写 "zero_optimization": {"offload_optimizer": ...}',
    "process groups are always created after all ranks have joined; leave this flag out": "rank 到齐后才建立进程组；去掉它",
    "start the ranks with tools/launch.py, torchrun or deepspeed": "用 tools/launch.py、torchrun 或 deepspeed 启动各进程",
    "layers do not share weights": "层之间不共享权重",
    "no token is dropped, so experts have no capacity": "从不丢弃词元，专家没有容量上限",
    "routers compute in fp32": "路由器用 fp32 计算",
    "Megatron-LM's factor of the auxiliary loss is 0 by default": "Megatron-LM 的辅助损失系数默认为 0",
    "Megatron-LM normalizes sigmoid scores, except that of a single expert": "Megatron-LM 会归一化 sigmoid 得分，但只选一个专家时不归一化",
    "Megatron-LM always normalizes sigmoid scores of several experts": "Megatron-LM 总是归一化几个专家的 sigmoid 得分",
    "experts are always split over --model-parallel-size ranks, which does not change the loss": "专家总是按 --model-parallel-size 切分，损失不变",
    "give --num-shared-experts, each as wide as an expert": "请给 --num-shared-experts，每个与专家同宽",
    "choose --router-balance aux-loss, bias, bias-and-aux-loss or none": (
        "可选 --router-balance aux-loss、bias、bias-and-aux-loss 或 none"
    ),
    "norms always come before attention and MLP (pre-LN)": "归一化在注意力和 MLP 之前",
    "there is no BERT model": "这里没有 BERT",
    "export to Hugging Face with "
    "tools/convert_checkpoint.py, and from there to ONNX": "tools/convert_checkpoint.py 导出为 Hugging Face 格式，由后者导出 ONNX",
    "weights are drawn from a normal distribution; see --init-method-std": "权重取正态分布，见 --init-method-std",
    "this activation is not supported; see --activation for the supported ones": "有哪几种见 --activation",
    "norm weights are always stored as they are, without subtracting 1": "归一化直接乘以它的权重",
    "the norms of --qk-norm always have a learned weight": "--qk-norm 带有权重",
    "rotary embeddings pair the two halves of a head, as in Hugging Face": "旋转的是一个头的前后两半，与 Hugging Face 相同",
    "all layers use the same --sliding-window": "所有层用同一个 --sliding-window",
    "use --num-key-value-heads to shrink keys and values": "缩小键和值的是 --num-key-value-heads",
    "with --sequence-parallel each model-parallel rank stores only its "
    "slice of the checkpointed inputs": "用 --sequence-parallel，每个张量并行 rank 只保留所存输入的一段",
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
    "the loss is always computed in fp32": "损失用 fp32 计算",
    "hidden states have the dtype of --precision; for fp32 hidden states, pass "
    "--precision fp32": "隐藏状态用 --precision；要 fp32 就全部用 fp32",
    "--weight-decay is constant": "--weight-decay 自始至终不变",
    "all samples have the full sequence length": "所有样本都是满的",
    "only the gradient norm is logged": "范数只记录梯度的",
    "on SIGTERM the run saves and exits; the same command resumes it": "SIGTERM 保存并结束运行，同一条命令继续",
    "there are no retrieval models": "这里没有检索",
    "use --zero-stage 3 to shard weights over replicas": "在副本间分摊权重的是 --zero-stage 3",
    "use --offload-activations, which offloads the activations of all layers": "--offload-activations 搬走所有层的激活",
    "steps with a NaN or Inf gradient are always skipped": "梯度不是有限数的一步从不更新权重",
    "the only FP8 recipe is that of --precision fp8; use this flag instead": "FP8 只有 --precision fp8 一种做法；改用它",
    "the warmup of the learning rate always starts from 0": "学习率从 0 升起",
    "give --data-path; to try a run, preprocess corpus/sample.jsonl": "给出 --data-path；试运行可用 corpus/sample.jsonl 预处理",
    "name corpora with --data-path, or with --train-data-path, "
    "--valid-data-path and --test-data-path": "语料由 --data-path、--train-data-path 等给出",
    "name the checkpoint itself, as in --load runs/mine/checkpoints/iter_0000200": "用 --load 指出这个检查点，例如"
    " runs/mine/checkpoints/iter_0000200",
    "pass --config with the config.json of the run that wrote the checkpoint": "用 --config 给出那次运行的 config.json",
    # Notes on keys of JSON files.
    "the gated MLP of Llama": "带门控，与 Llama 相同",
    "the key does not say whether the MLP is gated, as a Llama's is; give --activation": "看不出 MLP 是否像 Llama 那样带门控；请给出 --activation",
    "--warmup, computed as a fraction of --lr-decay-iters; this warm-up is linear, DeepSpeed's by default logarithmic": "--warmup，由衰减的迭代次数算出；预热是线性的，而 DeepSpeed 默认按对数预热",
    "output projections get this divided by sqrt(2 x layers), as in GPT-2; transformers' Llama does not divide": "输出投影的标准差还要除以 sqrt(2 × 层数)，与 GPT-2 相同；transformers 的 Llama 不除",
}
