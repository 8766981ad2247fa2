"""A disk tier with arbitrary bytes in its files raises one kind of error or works, and never serves a wrong block.

By default, 10,000 mutations of the files and 1,000 headers drawn by Hypothesis; with `KVCACHE_STRESS=100`, a million.
"""

import json
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from disks import SCALE, Disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.tiers.disk.directory import TierDirectory
from kvcache.tiers.disk.header import Header, TierDirectoryError
from kvcache.tiers.disk.slot_table import SlotTable

NUM_SLOTS = 8
BLOCK_BYTES = 512
KEYS = [b"key-%d" % i * (i + 1) for i in range(NUM_SLOTS)]
FINGERPRINT = {"model": "m", "dims": [1, 2]}


def open_disk(path):
    return Disk(path, NUM_SLOTS, BLOCK_BYTES, num_host=NUM_SLOTS, fingerprint=FINGERPRINT, flush_interval_s=1000)


def make_directory(path):
    disk = open_disk(path)
    assert len(disk.store(KEYS).done) == NUM_SLOTS
    disk.tier.touch(KEYS)
    disk.tier.shutdown()
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """Yield a folder in memory, where a sync is fast, or else a temporary folder."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("fuzz")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fuzz-of-kvcache-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def sound(memory):
    """Return a directory with blocks, and the bytes of its files."""
    path = memory / "sound"
    return path, make_directory(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["format", "version", "block_bytes", "num_slots", "epoch", "salt", "fingerprint", "resizing", "other"]


@settings(max_examples=max(10, round(1000 * SCALE)), suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_header_of_any_bytes_is_handled(sound, data):
    path, files = sound
    values = json.loads(files["kvcache.json"])
    body = data.draw(
        st.one_of(
            st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1, max_size=2).map(
                lambda changes: json.dumps(values | changes).encode()
            ),
            st.binary(max_size=100),
            JSON.map(lambda value: json.dumps(value).encode()),
        )
    )
    (path / "kvcache.json").write_bytes(body)
    try:
        directory = TierDirectory(path, None, read_only=True)
    except TierDirectoryError:
        return
    try:
        header = directory.header
        assert header.block_bytes >= 1
        assert header.num_slots >= 1
        assert 1 <= header.epoch < 1 << 32
        assert 1 <= header.salt < 1 << 64
        assert isinstance(header.fingerprint, dict)
    finally:
        directory.close()
    wanted = Header.fresh(BLOCK_BYTES, NUM_SLOTS, FINGERPRINT)
    try:
        directory = TierDirectory(path, wanted)
    except TierDirectoryError:
        return
    assert (directory.header.num_slots, directory.header.fingerprint) == (NUM_SLOTS, FINGERPRINT)
    directory.close()
    for name, original in files.items():
        (path / name).write_bytes(original)


def load_table(path, files, **changed):
    for name, original in (files | changed).items():
        if (path / name).stat().st_size != len(original) or name in changed or name == "kvcache.json":
            (path / name).write_bytes(original)
    directory = TierDirectory(path, None, read_only=True)
    try:
        table = SlotTable(directory, read_only=True)
        try:
            return table, table.load()
        finally:
            table.close()
    finally:
        directory.close()


def mutated(dice, body):
    """Return bytes that differ from `body` in a few places, or in length; at times, bytes without any of `body`."""
    if dice.random() < 0.02:
        return dice.choice((b"\xff" * len(body), dice.randbytes(dice.randrange(len(body) + 1))))
    body = bytearray(body)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(max(1, len(body)))
        match dice.choice(("flip", "flip", "write", "copy", "cut", "grow")):
            case "flip":
                body[at : at + 1] = bytes(byte ^ 1 << dice.randrange(8) for byte in body[at : at + 1])
            case "write":
                piece = dice.randbytes(dice.randint(1, 16))
                body[at : at + len(piece)] = piece
            case "copy":
                start, at = dice.randrange(max(1, len(body))) // 128 * 128, at // 128 * 128
                body[at : at + 128] = body[start : start + 128]
            case "cut":
                if dice.random() < 0.3:
                    del body[at:]
            case "grow":
                body += dice.randbytes(dice.randrange(200))
    return bytes(body)


@pytest.mark.timeout(max(300, 30 * SCALE))
def test_mutated_files_load_only_true_records(memory):
    path = memory / "mutated"
    files = make_directory(path)
    table, true = load_table(path, files)
    right = {(key, int(seq), int(table.checksums[slot])) for key, slot, seq, _ in zip(*true, strict=True)}
    dice = random.Random(0)
    for number in range(max(3, round(10_000 * SCALE))):
        name = ("kvcache.json", "records", "recency")[number % 3]
        body = mutated(dice, files[name])
        try:
            table, found = load_table(path, files, **{name: body})
        except TierDirectoryError:
            assert name == "kvcache.json" or (name == "records" and len(body) < len(files[name]))
            continue
        finally:
            (path / name).write_bytes(files[name])
        held = {(key, int(seq), int(table.checksums[slot])) for key, slot, seq, _ in zip(*found, strict=True)}
        if name == "recency":
            assert (sorted(found.keys), sorted(found.slots.tolist())) == (sorted(KEYS), list(range(NUM_SLOTS)))
            assert np.all(np.diff(found.times.astype(object)) >= 0)
            assert int(found.times.max()) <= 1 << 62
        elif name == "records":
            assert held <= right
            assert len(set(found.slots.tolist())) == len(found.keys)


def damage(draw, path):
    """Damage one file of a directory as a disk, a crash or a user would; return a description."""
    name = draw.choice(["data", "data", "records", "records", "recency", "kvcache.json", "lock"])
    file = path / name
    if not file.is_file() or file.is_symlink():
        return name, "again"
    body = bytearray(file.read_bytes())
    kind = draw.choice(["flip", "flip", "zero", "swap", "cut", "grow", "delete", "pipe", "link", "directory", "old"])
    at = draw.randrange(max(1, len(body)))
    if kind == "flip":
        for _ in range(draw.choice([1, 1, 20])):
            body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        body[at : at + 512] = bytes(len(body[at : at + 512]))
    elif kind == "swap":
        step = 4096 if name == "data" else 128
        one, other = (draw.randrange(max(1, len(body) // step)) * step for _ in range(2))
        body[one : one + step], body[other : other + step] = body[other : other + step], body[one : one + step]
    elif kind == "cut":
        del body[at:]
    elif kind == "grow":
        body += draw.randbytes(draw.randint(1, 5000))
    else:
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "link":
            file.symlink_to(path / "recency" if name != "recency" else path / "data")
        elif kind == "directory":
            file.mkdir()
        elif kind == "old":
            file.write_bytes(bytes(len(body)))
        return name, kind
    file.write_bytes(body)
    return name, kind


def test_damaged_directory_serves_no_wrong_byte(memory):
    path = memory / "tier"
    draw = random.Random(11)
    original = None
    counts = Counter()
    for _ in range(round(250 * SCALE)):
        if original is None or not path.exists():
            shutil.rmtree(path, ignore_errors=True)
            make_directory(path)
            original = memory / "original"
            shutil.rmtree(original, ignore_errors=True)
            shutil.copytree(path, original)
        done = [damage(draw, path) for _ in range(draw.choice([1, 1, 2]))] if draw.random() < 0.98 else []
        counts["directories"] += 1
        try:
            disk = open_disk(path)
        except TierDirectoryError:
            counts["refused"] += 1
        else:
            try:
                if held := disk.held(KEYS):
                    counts["loaded"] += len(disk.load_right(held).done)
                new = [b"new-%d" % i for i in range(3)]
                assert sorted(disk.store(new).done) == sorted(disk.load_right(new).done) == new, done
            finally:
                disk.tier.shutdown()
        shutil.rmtree(path)
        shutil.copytree(original, path)
    print(dict(counts))
    assert counts["loaded"] > counts["directories"]
    assert counts["refused"] > counts["directories"] // 10
