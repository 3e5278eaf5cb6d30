"""Search for the fastest layout that fits in memory, from the model's shapes and the cluster's data sheet."""
