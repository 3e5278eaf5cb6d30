"""Command-line tools, one module for each script in `tools/`, and code that they share (cli, journal, ...)."""
