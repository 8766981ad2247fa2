"""What differs between vLLM releases, in one table, and the refusal of a release that nobody tried.

vLLM calls its plug-in interface experimental and moves it with every minor release; an adapter that guesses would end
an engine in the middle of a request, so it refuses at start instead.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

ALLOW_UNTRIED = "KVCACHE_ALLOW_UNTRIED_VLLM"

# Without these no release can work: the engine checks for its own classes, or compares with `is`.
REQUIRED_NAMES = {
    "vllm.v1.kv_offload.base": (
        "LookupResult",
        "Medium",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingManager",
        "OffloadingSpec",
        "OffloadingWorker",
        "RequestOffloadingContext",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": ("OffloadingConnectorStats",),
}


@dataclass(frozen=True, slots=True)
class Release:
    """What one minor release of vLLM has.

    Parameters
    ----------
    key_positions : bool
        The request context knows every key of the request and where its block ends (``_offload_key_positions``);
        without, only the keys that were stored or loaded are ordered when a request ends.
    load_source : bool
        The engine asks which medium a loaded block came from (``vllm.v1.metrics.cache_hit_source``).
    """

    key_positions: bool
    load_source: bool


# Each has run tests/vllm/test_adapter.py and the tests of one engine on the CPU; 0.32 has run all. Of 0.33 there was no
# CPU build: its Python ran over the compiled operations of 0.32.
RELEASES = {
    (0, 30): Release(key_positions=False, load_source=False),
    (0, 31): Release(key_positions=True, load_source=False),
    (0, 32): Release(key_positions=True, load_source=True),
    (0, 33): Release(key_positions=True, load_source=True),
}


@functools.cache
def installed_release() -> Release:
    """Return the table's line for the vLLM that is installed.

    Raises
    ------
    ImportError
        No vLLM is installed, its release has not been tried, or it lacks a name that the adapter needs; the message
        says which. The environment variable ``KVCACHE_ALLOW_UNTRIED_VLLM=1`` lets an untried release pass that lacks
        nothing.
    """
    try:
        found = importlib.import_module("vllm").__version__
    except ImportError as error:
        raise ImportError("kvcache.integrations.vllm needs vLLM, and none is installed") from error
    return choose_release(found, allow_untried=os.environ.get(ALLOW_UNTRIED) == "1")


def choose_release(
    found: str,
    allow_untried: bool = False,
    import_module: Callable[[str], ModuleType] = importlib.import_module,
) -> Release:
    """Return the table's line for release `found`, or raise ImportError; see `installed_release`."""
    tried = ", ".join(f"{major}.{minor}" for major, minor in RELEASES)
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = RELEASES.get((int(numbers[1]), int(numbers[2]))) if numbers else None
    missing = missing_names(import_module)
    if missing:
        raise ImportError(f"vLLM {found} lacks what kvcache needs: {', '.join(missing)} (tried with: {tried})")
    if release is not None:
        return release
    if not allow_untried:
        raise ImportError(
            f"vLLM {found} has not been tried with kvcache (tried: {tried}). Every name it needs is there, so it may "
            f"work: set {ALLOW_UNTRIED}=1 to run it at your own risk, or install a release that was tried"
        )
    return max(RELEASES.items())[1]


def missing_names(import_module: Callable[[str], ModuleType]) -> list[str]:
    """Return the dotted names that the adapter needs and the installed vLLM does not have."""
    missing = []
    for module_name, names in REQUIRED_NAMES.items():
        try:
            module = import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        missing += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
    return missing
