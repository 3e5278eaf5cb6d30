"""Checks of an installation and a run before launch; each problem is reported with a remedy.

Only checks that need torch import it, so that the others can report that torch is missing.
"""
