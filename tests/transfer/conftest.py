"""Fixtures that several modules need."""

import sys
from pathlib import Path

# For `geometries` and `host_stream`.
sys.path.insert(0, str(Path(__file__).parent))
