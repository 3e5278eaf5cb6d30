"""Verification that a run computes the same values in another layout, and the first layer where it does not."""
