"""Benchmarks. Some start servers as the tests do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "references"))
