"""Differences between vLLM releases, in one table; untried releases are refused.

vLLM's plug-in interface is experimental and changes with every minor release. An adapter that guesses would end the
engine in the middle of a request, so this one refuses at start.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from dataclasses import dataclass

ALLOW_UNTRIED = "KVCACHE_ALLOW_UNTRIED_VLLM"


@dataclass(frozen=True, slots=True)
class Release:
    """Features of one minor release of vLLM."""

    # The request context holds the end position of every key's block (``_offload_key_positions``). Without it, only
    # stored and loaded keys are ordered when a request ends.
    key_positions: bool
    # The engine asks for the medium that a loaded block came from (``vllm.v1.metrics.cache_hit_source``).
    load_source: bool
    # The result of a secondary tier's job has the field ``transfer_bytes``.
    job_bytes: bool
    # vLLM's manager loads an eviction policy by ``cache_policy_module_path``.
    policy_module: bool = True


# Each passed tests/vllm/test_adapter.py and the tests of one engine on the CPU; 0.32 passed all. 0.33 had no CPU build:
# its Python code ran over the compiled operations of 0.32.
RELEASES = {
    (0, 30): Release(key_positions=False, load_source=False, job_bytes=False, policy_module=False),
    (0, 31): Release(key_positions=True, load_source=False, job_bytes=True),
    (0, 32): Release(key_positions=True, load_source=True, job_bytes=True),
    (0, 33): Release(key_positions=True, load_source=True, job_bytes=True),
}
TRIED = ", ".join(f"{major}.{minor}" for major, minor in RELEASES)


@functools.cache
def installed_release() -> Release:
    """Return the table's entry for the installed vLLM.

    ImportError: vLLM is not installed or has not been tried. With ``KVCACHE_ALLOW_UNTRIED_VLLM=1`` in the environment,
    an untried release is accepted.
    """
    try:
        version = importlib.import_module("vllm").__version__
    except ImportError as error:
        raise ImportError("kvcache.integrations.vllm needs vLLM, which is not installed") from error
    return choose_release(version, allow_untried=os.environ.get(ALLOW_UNTRIED) == "1")


def describe_release(needs_policy_module: bool = False) -> tuple[str, str, str]:
    """Return what the installed release lacks as level, subject and text of a finding; does not import vLLM."""
    from importlib import metadata

    names = metadata.packages_distributions().get("vllm")
    if not names:
        return "ok", "release", f"vLLM is not installed here; tried: {TRIED}"
    version = metadata.version(names[0])
    release = _entry_of(version)
    if release is None:
        return "warning", "release", f"vLLM {version} has not been tried (tried: {TRIED}); see {ALLOW_UNTRIED}"
    if needs_policy_module and not release.policy_module:
        return "error", "release", f"vLLM {version} loads no eviction policy of another package"
    lacks = {
        "the order of a prompt's keys": release.key_positions,
        "the medium of a loaded block": release.load_source,
        "the bytes of a tier's job": release.job_bytes,
    }
    missing = ", ".join(name for name, is_there in lacks.items() if not is_there)
    return "ok", "release", f"vLLM {version} lacks {missing or 'nothing that kvcache uses'}"


def _entry_of(found: str) -> Release | None:
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return RELEASES.get((int(numbers[1]), int(numbers[2]))) if numbers else None


def choose_release(found: str, allow_untried: bool = False) -> Release:
    """Return the table's entry for release `found`, or raise ImportError; see `installed_release`."""
    release = _entry_of(found)
    if release is not None:
        return release
    if not allow_untried:
        raise ImportError(
            f"vLLM {found} has not been tried with kvcache (tried: {TRIED}). Set {ALLOW_UNTRIED}=1 to run it at your "
            "own risk, or install a release that was tried"
        )
    return max(RELEASES.items())[1]
