"""One rank of tools/verify_layout.py: runs an unmodified entry script with a recorder attached.

Arguments: the folder of the records, the number of steps, the script and its own flags.
"""

import runpy
import sys
from pathlib import Path

from .recorder import record_run


def main(argv: list[str]) -> None:
    folder, steps, script, *flags = argv
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))  # `python script` does the same
    record_run(Path(folder), int(steps))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
