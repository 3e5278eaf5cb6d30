"""Whether a run gives the same numbers in another layout, and if not, which layer is the first that does not."""
