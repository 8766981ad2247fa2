"""Benchmarks. Some start servers as the tests do."""

import sys
from pathlib import Path

try:
    import kvcache  # noqa: F401
except ImportError as error:
    sys.exit(f"error: {error}")

sys.path.append(str(Path(__file__).parents[1] / "tests" / "references"))
