"""Command-line tools: launch and plan runs, check and verify them, report, convert checkpoints, generate text."""
