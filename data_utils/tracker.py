"""Python's process that counts semaphores: if this one is killed, the tracker removes them, and need not warn users."""

import sys
from multiprocessing import resource_tracker

_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"


def start_tracker() -> None:
    """Start the tracker with its warning of leaked semaphores off, unless it runs already."""
    sys.warnoptions.append(_QUIET)  # the tracker is started with the options of this process
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET)
