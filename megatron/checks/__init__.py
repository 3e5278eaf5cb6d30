"""What can be known of an installation and a run before it is launched, a sentence for each thing and what to do about it.

Torch is imported by those checks only that need it, so that the others can say that it is missing.
"""
