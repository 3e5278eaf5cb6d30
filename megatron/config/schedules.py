"""Pipeline schedules that a script has registered in `tds.schedule`; the other settings load without tds."""

from tds.schedule import BackwardWeight, find_schedule


def is_registered(name: str) -> bool:
    """Return whether `name` is the name of a built-in or a registered schedule."""
    try:
        find_schedule({"schedule": name})
    except ValueError:
        return False
    return True


def splits_backward(name: str, stages: int, micros: int) -> bool:
    """Return whether a registered schedule computes the gradients of weights in separate passes."""
    if not is_registered(name):
        return False
    schedule = find_schedule({"schedule": name})
    first_stage_passes = schedule(0, stages, micros)
    return any(isinstance(each, BackwardWeight) for each in first_stage_passes)
