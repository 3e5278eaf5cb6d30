"""Put this checkout on Python's module path; Python itself adds only the folder of the script that it runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
