"""Optional parts of a run. `megatron/training/feature_table.py` says which setting asks for which.

The core never imports this package by name; features import the core.
"""
