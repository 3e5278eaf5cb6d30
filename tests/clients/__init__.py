"""Patterns of public projects that train with `deepspeed.pipe`, on DeepSpeed's engine and on tds's, beside torch."""
