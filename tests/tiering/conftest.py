"""Find `stores`, whose helpers run jobs to their end."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tiers"))
