"""`python -m tests.gpu`: every check on this machine's accelerator, with nothing but torch, DeepSpeed and numpy."""

import sys

from megatron import device as device_module

from .checks import CHECKS, Impossible


def main() -> None:
    print(f"on {device_module.current()}")
    failed = 0
    for name, check in CHECKS.items():
        try:
            said = f"ok: {check()}"
        except Impossible as error:
            said = f"not here: {error}"
        except (AssertionError, RuntimeError) as error:
            said, failed = f"FAILED: {error}", failed + 1
        print(f"{name:40} {said}", flush=True)
    sys.exit(failed)


main()
