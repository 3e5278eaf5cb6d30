"""Estimate of the memory of a run from tensor shapes, before any weight is allocated."""
