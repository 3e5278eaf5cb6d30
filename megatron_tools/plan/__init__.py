"""Search for the fastest layout that fits: memory, time and schedule from shapes and a cluster's data sheet."""
