"""Datasets that read `.bin/.idx` files. Sample n does not depend on the number of ranks."""
