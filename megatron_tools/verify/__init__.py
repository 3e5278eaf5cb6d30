"""Verification that a run computes the same values in another layout; reports the first layer that differs."""
