"""Thin adapters for code written for CPM-Pretrain: its names, signatures and masks.

names.py     modules and names of the original: where each is now, or its counterpart
models.py    models that read `get_args()` and take attention masks
masks.py     attention masks, and the document ids that they are equivalent to
data.py      data sets by the original's keywords and under its keys
pretrain.py  `pretrain()`, the original's way into a run
script.py    tasks made of an entry script's functions
args.py      attributes of `get_args()` that are no settings here
"""
