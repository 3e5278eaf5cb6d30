"""Checks of an installation and a run before launch; each finding has a remedy.

Only checks that need torch import it, so that the others can report that it is missing.
"""
