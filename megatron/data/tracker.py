"""Starts Python's resource tracker without its warning about leaked semaphores.

The tracker removes the semaphores of a killed process, so the warning is needless.
"""

import sys
from multiprocessing import resource_tracker

_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"


def start_tracker() -> None:
    """Start the resource tracker without its warning about leaked semaphores, unless the tracker already runs."""
    sys.warnoptions.append(_QUIET)  # the tracker inherits the warning options of this process
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET)
