"""Python looks for packages next to the file that it runs; those of this checkout stand one folder up."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
