"""Real bytes in a replay: loaded blocks equal stored ones, and errors name a block that differs."""

import sys

import numpy as np
import pytest

pytest.importorskip("torch")

from kvcache import CPUOffloadingManager
from kvcache.lab.simulate.payload import VerifiedPayload
from kvcache.lab.simulate.run import Replay
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.requests import DataMismatchError, TransferFailedError
from kvcache.specs import CPULoadStoreSpec, TransferResult

BLOCK_BYTES = 128 * 1024
NUM_BLOCKS = 100


@pytest.fixture
def payload():
    with VerifiedPayload(NUM_BLOCKS, BLOCK_BYTES) as payload:
        yield payload


@pytest.fixture
def keys():
    return KeyMaker()(np.arange(70))


SPEC = CPULoadStoreSpec(np.arange(70) + 5)


def test_stored_blocks_return_in_any_order(payload, keys):
    payload.store(keys, SPEC)
    payload.load(keys, SPEC)
    payload.load(keys[::-1], CPULoadStoreSpec(SPEC.block_ids[::-1]))
    payload.load([], CPULoadStoreSpec([]))
    report = payload.as_dict()
    assert report["verified_blocks"] == 140
    assert (report["store_bytes"], report["load_bytes"]) == (70 * BLOCK_BYTES, 140 * BLOCK_BYTES)
    assert report["store_gb_per_s"] > 0
    assert report["load_gb_per_s"] > 0


@pytest.mark.parametrize("block", [0, 15, 16, 69])
@pytest.mark.parametrize("byte", [0, 4097, BLOCK_BYTES - 1])
def test_one_flipped_bit_is_named(payload, keys, block, byte):
    payload.store(keys, SPEC)
    payload.pool.array[5 + block, byte] ^= 4
    with pytest.raises(DataMismatchError) as caught:
        payload.load(keys, SPEC)
    message = str(caught.value)
    assert message.startswith(f"block {5 + block} of key {keys[block].hex()} differs")
    assert f"at byte {byte // 8 * 8}: expected " in message


def test_swapped_blocks_are_found(payload, keys):
    payload.store(keys, SPEC)
    payload.pool.array[[7, 8]] = payload.pool.array[[8, 7]]
    with pytest.raises(DataMismatchError, match=f"block 7 of key {keys[2].hex()}"):
        payload.load(keys, SPEC)


def test_missing_copy_is_found(payload, keys, monkeypatch):
    payload.store(keys, SPEC)
    payload.load(keys, SPEC)
    monkeypatch.setattr(payload, "_submit", lambda *args, **kwargs: 1)
    monkeypatch.setattr(payload, "_finish", lambda *args: None)
    with pytest.raises(DataMismatchError, match="block 5 "):
        payload.load(keys, SPEC)


def test_failed_transfer_is_reported(payload, keys, monkeypatch):
    worker = payload._worker
    taken = worker.get_finished
    failed = [TransferResult(1, False, 0, 0.0, ("GPU", "CPU"))]
    monkeypatch.setattr(worker, "get_finished", lambda: failed if taken() else [])
    with pytest.raises(TransferFailedError, match=r"a store of blocks failed \(job 1\)"):
        payload.store(keys[:1], CPULoadStoreSpec([0]))


@pytest.mark.parametrize("block_bytes", [0, 12, True, 64.0])
def test_bad_block_bytes_are_named(block_bytes):
    with pytest.raises(ValueError, match=f"block_bytes must be a multiple of 8, got {block_bytes}"):
        VerifiedPayload(4, block_bytes)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_chats_survive_eviction_byte_for_byte(policy):
    make_keys = KeyMaker()
    with VerifiedPayload(600, 4096) as payload:
        replay = Replay(CPUOffloadingManager(16, 600, policy), payload)
        for request in ChatWorkload(num_requests=300):
            replay.step(request, make_keys(request.hash_ids))
        report = payload.as_dict()
    assert replay.tally.evicted_blocks > 1000
    assert report["verified_blocks"] == replay.tally.hit_blocks > 1000
    assert report["store_bytes"] == replay.tally.stored_blocks * 4096


def test_demo_without_tier_imports_none(run_json, monkeypatch):
    # A tier needs the extra `disk`, which `pip install kvcache` leaves out.
    monkeypatch.setitem(sys.modules, "kvcache.lab.simulate.tiered", None)
    assert run_json("demo", "--no-data", "--requests", 20)["requests"] == 20


def test_demo_moves_and_compares_real_bytes(run_json):
    document = run_json("demo", "--requests", 200, "--memory", "4MiB", "--block-bytes", "8KiB")
    assert document["num_blocks"] == 512
    assert document["data"]["verified_blocks"] == document["hit_blocks"] > 0
    assert document["data"]["store_bytes"] == document["stored_blocks"] * 8192


def test_mismatch_ends_with_status_1(run, monkeypatch):
    stored = VerifiedPayload.store

    def store_and_flip(self, keys, spec):
        stored(self, keys, spec)
        self.pool.array[spec.block_ids[0], 9] ^= 1

    monkeypatch.setattr(VerifiedPayload, "store", store_and_flip)
    status, _, err = run("demo", "--requests", 50, "--blocks", 5000, "--block-bytes", 4096)
    assert status == 1
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith("kvcache: error: block ")
    assert "differs from what was stored at byte 8: expected " in line
