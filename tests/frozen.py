"""Imported last by the process that ranks are forked from: what it has imported is no garbage, so no rank looks through it or copies its pages."""

import gc

gc.collect()
gc.freeze()
