"""Flags and configuration keys of other projects, translated to our settings or refused by name."""
