"""Thin adapters for code written for CPM-Pretrain: its names, signatures and masks.

names.py     modules and names of CPM-Pretrain, and where this project has them or what replaces them
models.py    models that read `get_args()` and accept attention masks
masks.py     attention masks, and their conversion to the equivalent document ids
data.py      data sets with CPM-Pretrain's arguments and sample keys
pretrain.py  `pretrain()`, CPM-Pretrain's entry point of a run
script.py    tasks that call an entry script's functions
args.py      attributes of `get_args()` that CPM-Pretrain has but this project's settings lack
"""
