"""Start of Python's resource tracker without its warning about leaked semaphores.

The tracker itself removes the semaphores of a killed process, so users need no warning.
"""

import sys
from multiprocessing import resource_tracker

_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"


def start_tracker() -> None:
    """Start the resource tracker without its warning about leaked semaphores; no effect if the tracker runs already."""
    sys.warnoptions.append(_QUIET)  # the tracker inherits the warning options of this process
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET)
