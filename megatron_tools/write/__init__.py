"""Inference with trained models: text generation, scoring and benchmarks."""
