"""Locks of the folders that a run writes to."""
