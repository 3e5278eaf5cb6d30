"""From `.bin/.idx` on disk to the n-th training sample, the same on every run and every layout."""
