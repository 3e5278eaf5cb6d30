"""Flags and configuration keys of other frameworks: their translation to this project's settings, or their refusal."""
