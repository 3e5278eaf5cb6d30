"""Reference page of names that scripts import from CPM-Pretrain, with the counterpart of each name in this project."""

from collections.abc import Iterator

from megatron_compat.names import COUNTERPARTS, GONE_MODULES, HOMES, MODULES

from .words import WORDS

CHINESE = {
    "there is no BERT model": "这里没有 BERT",
    "the sample index needs no compiled helpers; remove this import": "样本不需要编译的辅助代码，去掉即可",
    "there are no retrieval models": "这里没有检索",
    "torch's attention is one kernel and --compile fuses other operations; remove "
    "this import": "torch 的注意力是一个内核，其余由 --compile 融合，去掉即可",
    "recomputed activations need no separate buffers; remove this import": "保留的激活值不需要专门的缓冲区，去掉即可",
    "DeepSpeed or tds.DistributedOptimizer reduces gradients; "
    "remove this import": "梯度由 DeepSpeed 或 tds.DistributedOptimizer 归约，去掉即可",
    "nothing is downloaded; give --vocab-file": "不下载任何文件，用 --vocab-file 给出",
    "SIGTERM makes a run save and end, and the same command resumes it": "SIGTERM 会保存并结束运行，同样的命令继续它",
    "--tensorboard writes events; metrics.jsonl has all numbers": "--tensorboard 写事件文件，metrics.jsonl 有全部数值",
    "runs save and load by --save, --load and --save-interval; megatron.checkpointing.save_checkpoint in a custom "
    "loop": "保存和加载由 --save、--load、--save-interval 决定；自己的循环里用 megatron.checkpointing.save_checkpoint",
    "megatron.data.t5_dataset.T5Dataset, or "
    "cpm_triples.CPMTripleDataset": "megatron.data.t5_dataset.T5Dataset，或 cpm_triples.CPMTripleDataset",
    "tools/preprocess_data.py --objective cpm-t5 masks "
    "spans in advance, megatron.data.t5_dataset on reading": "tools/preprocess_data.py --objective cpm-t5 "
    "预先遮盖片段，megatron.data.t5_dataset 在读取时遮盖",
    "megatron.data.sampler.ConsecutiveSampler; data sets "
    "shuffle by --seed": "megatron.data.sampler.ConsecutiveSampler；数据集按 --seed 打乱",
    "tds.initialize casts a model as --precision says": "tds.initialize 按 --precision 转换模型",
    "tds.initialize wraps an optimizer as --precision says": "tds.initialize 按 --precision 包装优化器",
    "--precision fp16 converts weights and keeps fp32 master weights; remove "
    "this import": "--precision fp16 会转换权重并保留 fp32 主权重，去掉即可",
    'DeepSpeed scales losses ("fp16" of --deepspeed-config); '
    "remove this import": 'DeepSpeed 负责损失缩放（--deepspeed-config 的 "fp16"），去掉即可',
    "pretrain() sets what get_args(), get_tokenizer() "
    "and get_timers() return": "pretrain() 会准备好 get_args()、get_tokenizer() 和 get_timers() 的返回值",
    "pretrain(...), or megatron.training.start_engine in a "
    "custom loop": "pretrain(...)；自己的循环里用 megatron.training.start_engine",
    "--lr-decay-style, --warmup and --min-lr; "
    "megatron.optim.lr_at": "--lr-decay-style、--warmup 和 --min-lr；megatron.optim.lr_at",
    "megatron.model.block.Block is one transformer "
    "layer; gpt2_layers and t5_layers list the layers of a model": "megatron.model.block.Block 是一个 Transformer "
    "层；gpt2_layers 和 t5_layers 列出模型的各层",
    "VocabParallelEmbedding.first_row and .rows": "VocabParallelEmbedding.first_row 和 .rows",
    "mpu.divide(numerator, denominator), which rejects a remainder": "mpu.divide(numerator, denominator)，有余数时报错",
    "megatron.tokenizer.load_tokenizer(path) for a "
    "vocab.json with merges.txt": "megatron.tokenizer.load_tokenizer(path)，给出旁边有 merges.txt 的 vocab.json",
    "megatron.tokenizer.load_tokenizer(path) for a "
    "vocab.txt": "megatron.tokenizer.load_tokenizer(path)，给出 vocab.txt",
    "megatron.tokenizer.load_tokenizer(path), to which "
    "pretrain_t5.py adds sentinels": "megatron.tokenizer.load_tokenizer(path)，pretrain_t5.py 再加上哨兵词元",
    "pretrain() builds loaders; "
    "megatron.data.sampler.build_loader in a custom loop": "pretrain() 会构建读取器；自己的循环里用 "
    "megatron.data.sampler.build_loader",
    "grad_norm of metrics.jsonl, and --check-replicas": "metrics.jsonl 的 grad_norm，以及 --check-replicas",
    "memory_mb of metrics.jsonl": "metrics.jsonl 的 memory_mb",
}


def _rows(chinese: bool) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: (all names in CPM-Pretrain that have the same counterpart, this counterpart)."""
    found: dict[str, list[str]] = {}
    for gone, words in GONE_MODULES.items():
        found.setdefault(words, []).append(f"`{gone}`")
    for (module, name), words in COUNTERPARTS.items():
        shown = f"`{name}`" if f"`{module}`" not in found.setdefault(words, []) else ""
        if shown and shown not in found[words]:
            found[words].append(shown)
    there = [f"`{module}`" for module, home in MODULES.items() if home] + [f"`{name}`" for _, name in HOMES]
    comma = "、" if chinese else ", "
    yield comma.join(there), "原样可用" if chinese else "unchanged"
    for words, names in found.items():
        yield comma.join(names), CHINESE.get(words, words) if chinese else words


def imports_page(say: dict[str, str]) -> str:
    """Return a page that lists every name that CPM-Pretrain's files import from each other."""
    rows = [f"| {names} | {words} |" for names, words in _rows(say is WORDS["zh"])]
    head = f"| {say['imported']} | {say['here']} |\n| --- | --- |"
    return "\n".join([f"# {say['imports']}\n\n{say['imports_about']}\n\n{head}", *rows])
