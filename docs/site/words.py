"""Text of the generated pages in both languages, besides the text taken from the code."""

WORDS = {
    "en": {
        "flags": "Every flag",
        "flags_about": "中文：[flags_zh.md](flags_zh.md)\n\nThe flags of `pretrain_gpt2.py`, `pretrain_llama.py` and "
        "`pretrain_t5.py`, "
        "by section; `--help` lists the same flags. Each flag is also a key of the JSON file for `--config FILE`, "
        "written "
        "with `_` instead of `-`, at the top level or under its section. Flags override files, and later files and "
        "flags "
        "override earlier ones. Some flags of other projects work, too: see [migration](../migration.md).\n\n"
        "This page is written by `python -m docs.site.reference`.",
        "flag": "flag",
        "values": "values",
        "default": "default",
        "meaning": "meaning",
        "only": " (only for: {})",
        "comma": ", ",
        "by_family": "Defaults that differ between the scripts",
        "script": "script",
        "variables": "Variables of scripts/run_*.sh",
        "variables_about": "Set these variables in the environment; flags passed to the script override them.",
        "variable": "variable",
        "ds_config": "Every key of a ds_config",
        "ds_config_about": "中文：[ds_config_zh.md](ds_config_zh.md)\n\nThe keys of the JSON file for "
        "`--deepspeed-config`. If a key is "
        'missing or `"auto"`, the flag decides. If a flag and a key have different values, an error shows both '
        "values. A key "
        "that this page does not list is refused.\n\nThis page is written by `python -m docs.site.reference`.",
        "key": "key",
        "resolved": "Keys with a corresponding flag",
        "passed_on": "Keys passed on to DeepSpeed",
        "refused": "Refused keys",
        "instead": "use instead",
        "inner": "Keys inside the sections",
        "inner_about": "Keys and defaults are those of the DeepSpeed version that requirements.txt pins; DeepSpeed's "
        "documentation "
        "explains them. A wrong key or value is refused before training starts.",
        "tools": "Every flag of the tools",
        "tools_about": "中文：[tools_zh.md](tools_zh.md)\n\nEvery tool accepts `--help`, and `--debug`, which shows the "
        "traceback of an error. "
        "Exit code 2 means wrong usage, 1 any other failure; stderr explains both in one sentence. An installed "
        "package has "
        "the tools as commands: see [getting started](../start.md#installed-as-commands).\n\n"
        "This page is written by `python -m docs.site.reference`.",
        "own_help": "Accepts torchrun's flags; `--help` lists them.",
        "api": "Public names",
        "api_about": "中文：[api_zh.md](api_zh.md)\n\nThe names that scripts may import. They are stable: a deprecated "
        "name works for one more "
        "minor version, with a warning. Shapes: `s` sequence length, `b` micro-batch size, `h` hidden size, `v` "
        "vocabulary "
        "size, `t` tensor-parallel ranks.\n\nThis page is written from the docstrings by `python -m "
        "docs.site.reference`.",
        "imports": "Imports from CPM-Pretrain",
        "imported": "name in CPM-Pretrain",
        "here": "in this project",
        "imports_about": "中文：[imports_zh.md](imports_zh.md)\n\nThe names that CPM-Pretrain's files import from each "
        "other. Names in the "
        "first row work unchanged. Importing any other name raises an error with the text of the right column.\n\n"
        "This page is written by `python -m docs.site.reference`.",
    },
    "zh": {
        "flags": "全部参数",
        "flags_about": "English: [flags.md](flags.md)\n\n`pretrain_gpt2.py`、`pretrain_llama.py` 和 `pretrain_t5.py` "
        "的参数，按部分排列，与 `--help` "
        "相同。每一项也可以写在 `--config FILE` 的 JSON 里（`-` 写作 `_`，单独写或写在所属部分之下）；参数优先于文件，后写的优先。"
        "其他项目的参数也可以用，见[迁移](../migration_zh.md)。说明文字取自代码，为英文。\n\n本页由 `python -m docs.site.reference` 写出。",
        "flag": "参数",
        "values": "取值",
        "default": "默认",
        "meaning": "含义",
        "only": "（只用于：{}）",
        "comma": "、",
        "by_family": "各脚本的其他默认值",
        "script": "脚本",
        "variables": "scripts/run_*.sh 的变量",
        "variables_about": "在环境中设置；给脚本的参数优先。",
        "variable": "变量",
        "ds_config": "ds_config 的全部键",
        "ds_config_about": "English: [ds_config.md](ds_config.md)\n\n`--deepspeed-config` 的 JSON。一个键可以不写，或写 "
        '`"auto"`：这时由参数决定。'
        "参数与键不同时报错，并给出两边的值；这里没有列出的键会被拒绝。\n\n本页由 `python -m docs.site.reference` 写出。",
        "key": "键",
        "resolved": "与参数对应的键",
        "passed_on": "交给 DeepSpeed 的键",
        "refused": "被拒绝的键",
        "instead": "改用",
        "inner": "各部分内的键",
        "inner_about": "键和默认值是 requirements.txt 中那个 DeepSpeed 版本的，各自的作用见 DeepSpeed 的文档。错误的键或值在启动之前就被拒绝。",
        "tools": "各工具的全部参数",
        "tools_about": "English: [tools.md](tools.md)\n\n各工具都接受 `--help`，以及显示错误回溯的 `--debug`。退出码 2：用法错误；1：失败，stderr "
        "上有一句话。安装之后它们是命令，"
        "见[入门](../start_zh.md#安装成命令)。说明文字取自代码，为英文。\n\n本页由 `python -m docs.site.reference` 写出。",
        "own_help": "接受 torchrun 的参数，由 `--help` 列出。",
        "api": "公开的名字",
        "api_about": "English: [api.md](api.md)\n\n脚本可以导入的名字。它们是稳定的：弃用的名字在下一个小版本里仍然可用，并给出警告。形状：`s` 序列长度，`b` "
        "微批次的样本数，`h` 隐藏层"
        "宽度，`v` 词表大小，`t` 张量并行大小。说明文字取自代码，为英文。\n\n本页由 `python -m docs.site.reference` 从 docstring 写出。",
        "imports": "从 CPM-Pretrain 导入的名称",
        "imported": "CPM-Pretrain 中的名称",
        "here": "本项目中",
        "imports_about": "English: [imports.md](imports.md)\n\nCPM-Pretrain "
        "各文件相互导入的名称。第一行的名称原样可用；导入其他名称会报错，错误信息就是右边一列的英文原文。"
        "\n\n本页由 `python -m docs.site.reference` 写出。",
    },
}

# The Chinese texts of megatron.config.ds_file.REPLACEMENT_FLAGS.
REPLACEMENTS = {
    "optimizer": "--optimizer、--lr、--adam-beta1 和 --weight-decay",
    "scheduler": "--lr-decay-style、--warmup 和 --min-lr",
    "activation_checkpointing": "--checkpoint-activations 和 --checkpoint-num-layers",
    "sparse_attention": "没有对应的参数：不支持",
    "amp": "--precision",
}

# The effect of each ds_config key, in English and Chinese.
KEYS = {
    "train_batch_size": (
        "samples per iteration: `--batch-size` x `--gas` x data-parallel replicas",
        "一次迭代的样本数：`--batch-size` x `--gas` x 副本数",
    ),
    "train_micro_batch_size_per_gpu": ("`--batch-size`", "`--batch-size`"),
    "gradient_accumulation_steps": ("`--gas`", "`--gas`"),
    "gradient_clipping": ("`--clip-grad`; 1.0 if neither is set", "`--clip-grad`；都没有写时为 1.0"),
    "steps_per_print": ("`--log-interval`; 10 if neither is set", "`--log-interval`；都没有写时为 10"),
    "wall_clock_breakdown": ("log how the time of an iteration is spent", "输出一次迭代的时间花在哪里"),
    "fp16": (
        "`enabled`: `--precision fp16`; the other keys control dynamic loss scaling",
        "`enabled`：`--precision fp16`；其余决定损失缩放怎样变化",
    ),
    "bf16": ("`enabled`: `--precision bf16`", "`enabled`：`--precision bf16`"),
    "zero_optimization": (
        "`stage`: `--zero-stage`; DeepSpeed reads the other keys",
        "`stage`：`--zero-stage`；其余由 DeepSpeed 读取",
    ),
    "zero_allow_untested_optimizer": (
        "true if it is not set, as the optimizer is torch's",
        "不写时为 true，因为优化器是 torch 的",
    ),
    "zero_force_ds_cpu_optimizer": (
        "false if it is not set, as an optimizer in host memory is torch's fused AdamW",
        "不写时为 false：放在主机内存的优化器是 torch 的融合 AdamW",
    ),
    "prescale_gradients": (
        "divide gradients before the all-reduce; if set, DeepSpeed does the all-reduce",
        "先除后加梯度；这时由 DeepSpeed 归约",
    ),
    "gradient_predivide_factor": (
        "divisor of gradients before the all-reduce; if set, DeepSpeed does the all-reduce",
        "预先除以多少；这时由 DeepSpeed 归约",
    ),
    "communication_data_type": (
        "dtype of the gradient all-reduce; if set, DeepSpeed does the all-reduce",
        "梯度传输的数据类型；这时由 DeepSpeed 归约",
    ),
    "dump_state": ("DeepSpeed prints its state at the start", "DeepSpeed 在启动时打印状态"),
    "flops_profiler": ("DeepSpeed's FLOPS profiler", "DeepSpeed 的运算量统计"),
    "comms_logger": ("DeepSpeed's log of collectives", "DeepSpeed 的集合通信日志"),
    "tensorboard": (
        "DeepSpeed's own events, in addition to those of `--tensorboard`",
        "DeepSpeed 自己的事件，与 `--tensorboard` 的事件并存",
    ),
    "wandb": ("DeepSpeed's own metrics in Weights & Biases", "DeepSpeed 自己的指标写到 Weights & Biases"),
    "csv_monitor": ("DeepSpeed's own metrics as CSV", "DeepSpeed 自己的指标写成 CSV"),
    "memory_breakdown": (
        "without a pipeline, DeepSpeed prints its memory use during training; on a GPU, `memory_mb` is then too small",
        "没有流水线时 DeepSpeed 打印内存使用；在 GPU 上 `memory_mb` 因此偏小",
    ),
}
