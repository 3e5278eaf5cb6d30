"""Datasets that read `.bin/.idx` files. Sample n is the same in every run and for any number of ranks."""
