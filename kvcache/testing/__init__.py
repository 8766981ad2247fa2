"""Test tools for authors of plug-ins: the conformance kit, and the specification in plain Python.

Names are imported on first use, so that the reference managers need neither pytest nor Hypothesis (extra `testing`).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "CacheMachine": "kvcache.testing.machine",
    "CodecContract": "kvcache.testing.codec_contract",
    "PolicyContract": "kvcache.testing.contract",
    "REFERENCE_POLICIES": "kvcache.testing.reference",
    "ReferenceGate": "kvcache.testing.reference",
    "ReferenceManager": "kvcache.testing.reference_manager",
    "TierContract": "kvcache.testing.tier_contract",
    "cache_machine": "kvcache.testing.machine",
}

__all__ = [*_HOME_OF]

if TYPE_CHECKING:
    from kvcache.testing.codec_contract import CodecContract as CodecContract
    from kvcache.testing.contract import PolicyContract as PolicyContract
    from kvcache.testing.machine import CacheMachine as CacheMachine
    from kvcache.testing.machine import cache_machine as cache_machine
    from kvcache.testing.reference import REFERENCE_POLICIES as REFERENCE_POLICIES
    from kvcache.testing.reference import ReferenceGate as ReferenceGate
    from kvcache.testing.reference_manager import ReferenceManager as ReferenceManager
    from kvcache.testing.tier_contract import TierContract as TierContract


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcache.testing' has no attribute {name!r}")
    pytest = sys.modules.get("pytest")
    if pytest is not None and home not in sys.modules:
        # Makes pytest show the values of a failed check.
        pytest.register_assert_rewrite(home)
    return getattr(importlib.import_module(home), name)
