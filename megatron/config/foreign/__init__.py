"""Flags and configuration keys of other projects, translated to this project's settings or refused by name."""
