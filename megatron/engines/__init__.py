"""Engines with a common interface: a step of training with a pipeline, and one without."""
