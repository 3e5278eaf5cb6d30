"""What is run by hand: a file for each command, which `tools/` starts, and what they share (cli, journal, sample_view, unigram)."""
