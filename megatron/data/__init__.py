"""Datasets: from `.bin/.idx` files to the n-th training sample, identical in every run and layout."""
