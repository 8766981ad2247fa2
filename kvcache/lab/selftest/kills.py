"""Kill the process of a tier during its writes, and check that all blocks in the tier are intact.

In each round, a child process writes more blocks than the tier can hold, and is killed. The tier is opened again, and
every block that it returns is compared. The bytes of a block are computed from its key.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvcache.assembly.assemble import parse_tier
from kvcache.background import python_words
from kvcache.lab.selftest.rows import OK, SKIPPED, WRONG, Row
from kvcache.tiers.base.tier import host_rows

BLOCK_BYTES = 256 << 10
NUM_BLOCKS = 256
_ROWS, _LATE_S = 32, 60.0
# More than the capacity, so that blocks are evicted and slots are overwritten.
_NUM_KEYS = 4 * NUM_BLOCKS


def check_kills(subject: str, entry: Mapping[str, Any], seconds: float) -> Iterator[Row]:
    """Yield whether the tier of an entry of ``tiers`` survives kills; takes about `seconds`.

    The caller removes the folder of a disk tier. Blocks in a store have this run's own fingerprint, and are deleted.
    """
    fingerprint = {"selftest": secrets.token_hex(8)}
    end_s, num_rounds, num_compared, num_wrong, num_stored = time.monotonic() + seconds, 0, 0, 0, 0
    while num_rounds < 2 or time.monotonic() < end_s:
        stored = _write_and_kill(entry, fingerprint, num_rounds)
        compared, wrong = _compare(entry, fingerprint, num_rounds)
        num_rounds, num_stored = num_rounds + 1, num_stored + stored
        num_compared, num_wrong = num_compared + compared, num_wrong + wrong
    text = f"{num_rounds} kills amid writes: {num_compared:,} blocks came back, {num_wrong} with wrong bytes"
    verdict = WRONG if num_wrong else OK if num_compared else SKIPPED
    if not num_compared:
        text += ": none was stored, so nothing is shown"
    text += _forget(entry, fingerprint)
    figures = {"kills": num_rounds, "stored": num_stored, "compared": num_compared, "wrong": num_wrong}
    yield Row(subject, text, verdict, figures)


def keys_of(number: int) -> list[bytes]:
    """Return the keys of one round; half of them are also keys of the previous round."""
    first = number * _NUM_KEYS // 2
    return [i.to_bytes(8, "big") for i in range(first, first + _NUM_KEYS)]


def fill(row: np.ndarray[Any, Any], key: bytes) -> None:
    """Fill a row with the bytes of the block of `key`."""
    words = row.view(np.uint64)
    np.multiply(np.arange(1, len(words) + 1, dtype=np.uint64), np.uint64(int.from_bytes(key, "big") * 2 + 1), out=words)


def _open(entry: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> Any:
    return parse_tier(entry).make(host_rows(_ROWS, BLOCK_BYTES), fingerprint)


def _write_and_kill(entry: Mapping[str, Any], fingerprint: Mapping[str, Any], number: int) -> int:
    """Run a child that writes, kill it, and return how many blocks it had stored. RuntimeError: it stored nothing."""
    given = json.dumps([dict(entry), dict(fingerprint), number])
    words = python_words(f"from {__name__} import write\nimport json\nwrite(*json.loads(sys.argv[1]))", given)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        num_stored, wanted = 0, int(np.random.default_rng(number).integers(NUM_BLOCKS // 2, _NUM_KEYS))
        try:
            for line in child.stdout:
                num_stored = int(line)
                if num_stored >= wanted:
                    break
        finally:
            child.kill()
        if not num_stored:
            raise RuntimeError((child.stderr.read().strip().splitlines() or ["it stored nothing"])[-1])
    return num_stored


def _compare(entry: Mapping[str, Any], fingerprint: Mapping[str, Any], number: int) -> tuple[int, int]:
    """Open the tier again, load its blocks, and return how many it returned and how many of them are wrong."""
    tier = _open(entry, fingerprint)
    num_compared = num_wrong = 0
    expected = np.empty(BLOCK_BYTES, np.uint8)
    try:
        keys = keys_of(number)
        for first in range(0, len(keys), _ROWS):
            tier.host_rows[:] = 0
            part = keys[first : first + _ROWS]
            for key in _run(tier, tier.submit_load, part):
                fill(expected, key)
                num_compared += 1
                num_wrong += not np.array_equal(tier.host_rows[part.index(key)], expected)
    finally:
        tier.shutdown()
    return num_compared, num_wrong


def _run(tier: Any, submit: Any, keys: list[bytes]) -> list[bytes]:
    """Move blocks between the tier and the first host rows, and return the keys that were moved."""
    deadline_s = time.monotonic() + _LATE_S
    if not submit(1, keys, list(range(len(keys)))):
        return []
    while time.monotonic() < deadline_s:
        for result in tier.get_finished():
            if result.job_id == 1:
                return list(result.done)
        time.sleep(0.001)
    raise RuntimeError(f"a job has not ended after {_LATE_S:.0f} s")


def _forget(entry: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> str:
    """Delete this run's names from a shared store; return why they stay, or ""."""
    clear: Any
    if entry["type"] == "valkey":
        from kvcache.tiers.valkey import clear_server as clear
    elif entry["type"] == "s3":
        from kvcache.tiers.s3 import clear_bucket as clear
    else:  # a directory, or a store that evicts old blocks itself
        return ""
    tier = _open(entry, fingerprint)
    # An open tier would announce its epoch again.
    tier.shutdown()
    try:
        # No engine has this fingerprint, so the prefix is of this run only.
        clear(parse_tier(entry).options, f"{tier.prefix.decode()}:", lambda *_: None)
    except Exception as error:  # the figures are known by now
        return f"; its blocks are still in the store: {error}"
    return ""


def write(entry: Mapping[str, Any], fingerprint: Mapping[str, Any], number: int) -> None:
    """Fill the tier, and print after each job how many blocks are stored."""
    tier = _open(entry, fingerprint)
    keys = keys_of(number)
    num_stored = 0
    for first in range(0, len(keys), _ROWS):
        part = keys[first : first + _ROWS]
        for row, key in enumerate(part):
            fill(tier.host_rows[row], key)
        num_stored += len(_run(tier, tier.submit_store, part))
        print(num_stored, flush=True)
