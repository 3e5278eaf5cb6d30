"""Freeze the garbage collector after all preloads, so that forked ranks neither scan nor copy those pages."""

import gc

gc.collect()
gc.freeze()
