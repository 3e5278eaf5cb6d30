"""What is run by hand: each file is one command, `tools/` has them under the same names."""
