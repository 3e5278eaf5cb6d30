"""Verification that a run computes the same values in different layouts; reports the first layer that differs."""
