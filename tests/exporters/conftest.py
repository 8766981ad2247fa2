"""The modules beside the tests can be imported: what other readers of KV events accept."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
