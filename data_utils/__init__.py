"""Data preparation: from raw text files to an iterator of clean documents."""
