"""`pip install .`: the packages, the commands of `tools/` (see the README for their names), and extras for what is optional.

NVIDIA's apex is not on the package index (the package of that name there is something else):
it is not needed, and where it was built from source it may stay.
"""

from pathlib import Path

from setuptools import find_packages, setup


def pinned(file: str) -> list[str]:
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


REQUIRED = [line for line in pinned("requirements.txt") if not line.startswith("matplotlib")]
PLOTS = [line for line in pinned("requirements.txt") if line.startswith("matplotlib")]
DATA = [
    line
    for line in pinned("requirements-dev.txt")
    if line.startswith(("jieba", "rjieba", "tokenizers", "regex", "zstandard", "datasketch", "pyarrow"))
]
RAY = [line for line in pinned("requirements-dev.txt") if line.startswith("ray")]
HF = [line for line in pinned("requirements-dev.txt") if line.startswith("transformers")]

COMMANDS = (
    "clean-corpus", "convert-checkpoint", "draw-schedule", "inspect-data", "preprocess-data", "profile-run", "simulate", "train-tokenizer",
    "verify-layout",
)  # fmt: skip

setup(
    name="megatron-tds",
    version="0.1.0",
    description="Pretraining of GPT-2, Llama and T5 in any data x tensor x pipeline layout, from a laptop to a cluster",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={
        "": "."
    },  # an editable install is a folder on the path, which a namespace of megatron-core does not hide
    py_modules=["pretrain_gpt2", "pretrain_llama", "pretrain_t5"],
    packages=find_packages(include=["megatron", "megatron.*", "tds", "tds.*", "data_utils", "data_utils.*"]),
    package_data={"megatron.reporting": ["page.css", "page.js"]},
    entry_points={
        "console_scripts": [
            "pretrain-gpt2 = pretrain_gpt2:main",
            "pretrain-llama = pretrain_llama:main",
            "pretrain-t5 = pretrain_t5:main",
            *(f"{name} = megatron.commands.{name.replace('-', '_')}:cli" for name in COMMANDS),
            *(
                f"megatron-{name} = megatron.commands.{name}:cli"
                for name in ("doctor", "evaluate", "generate", "launch", "plan", "report")
            ),
        ]
    },
    install_requires=REQUIRED,
    extras_require={
        "apex": [],  # build it from NVIDIA's source; see the note above
        "tensorboard": ["tensorboard==2.21.0"],
        "plots": PLOTS,
        "data": DATA,  # other tokenizers than sentencepiece, .zst files, cleaning, near duplicates
        "ray": RAY,  # data tools on a cluster
        "hf": HF,
        "eval": ["lm-eval==0.4.13"],  # megatron-evaluate --tasks
        "dev": pinned("requirements-dev.txt"),
        "bench": HF,
    },
)
