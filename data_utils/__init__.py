"""Data preparation: clean text files, train tokenizers, tokenize corpora, inspect the results."""
