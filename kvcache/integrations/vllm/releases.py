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
    """Differences between minor releases of vLLM; tests/vllm/test_releases.py compares each field with the release."""

    # An event can release the notes of a failed store without announcing a removal (``metadata_only``).
    metadata_only: bool
    # ``on_schedule_end`` is the last call of a step; else it precedes the step's ``prepare_store``.
    ends_step_last: bool


# Each passed tests/vllm on the CPU. 0.33 had no CPU build: its Python code ran over the compiled operations of 0.32.
RELEASES = {
    (0, 32): Release(metadata_only=False, ends_step_last=False),
    (0, 33): Release(metadata_only=True, ends_step_last=True),
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


def describe_release() -> tuple[str, str, str]:
    """Return whether the installed release was tried as level, subject and text of a finding; does not import vLLM."""
    from importlib import metadata

    names = metadata.packages_distributions().get("vllm")
    if not names:
        return "ok", "release", f"vLLM is not installed here; tried: {TRIED}"
    version = metadata.version(names[0])
    if _entry_of(version) is None:
        return "warning", "release", f"vLLM {version} has not been tried (tried: {TRIED}); see {ALLOW_UNTRIED}"
    return "ok", "release", f"vLLM {version} was tried"


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
