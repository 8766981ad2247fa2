"""Files and frames that no engine and no owner writes: one pool's fault stays its own."""

import json
import os
import shutil
import socket
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_harness import prompt, turn, wait_for

from kvcache.node import ledger as ledger_module
from kvcache.node import protocol
from kvcache.node.ledger import Ledger, read_ledger
from kvcache.node.owner import _remove_dead_pools
from kvcache.node.protocol import FrameReader, node_folder

IDENTITY = {"num_blocks": 16, "block_bytes": 64, "block_size": 16}


def make_ledger(path):
    Ledger(path, 16, IDENTITY)
    return path.read_bytes()


def with_identity(data, text):
    """Return a ledger's bytes with another text of its identity."""
    head = ledger_module._HEAD.unpack_from(data)
    first, length = ledger_module._HEAD.size, ledger_module._IDENTITY_BYTES
    return b"".join((
        ledger_module._HEAD.pack(*head[:3], len(text)), text.ljust(length, b"\0")[:length], data[first + length :],
    ))  # fmt: skip


HOSTILE = {
    "empty": lambda path, data: path.write_bytes(b""),
    "magic only": lambda path, data: path.write_bytes(data[:8]),
    "cut in head": lambda path, data: path.write_bytes(data[:20]),
    "cut in processes": lambda path, data: path.write_bytes(cut(data, 70_000)),
    "cut to first slot": lambda path, data: path.write_bytes(cut(data, ledger_module._FIRST_SLOT)),
    "odd length": lambda path, data: path.write_bytes(cut(data, len(data) - 7)),
    "deep identity": lambda path, data: path.write_bytes(with_identity(data, b"[" * 60_000)),
    "no identity": lambda path, data: path.write_bytes(with_identity(data, b"{}")),
    "other size": lambda path, data: path.write_bytes(with_identity(data, b'{"num_blocks": 99, "block_bytes": 64}')),
    "negative size": lambda path, data: path.write_bytes(with_identity(data, b'{"num_blocks": -1, "block_bytes": 0}')),
    "text size": lambda path, data: path.write_bytes(with_identity(data, b'{"num_blocks": "x", "block_bytes": 64}')),
    "bytes": lambda path, data: path.write_bytes(with_identity(data, b"\xff\xfe")),
    "holes": lambda path, data: (path.write_bytes(cut(data, 1 << 40)[:100]), os.truncate(path, 1 << 40)),
    "fifo": lambda path, data: os.mkfifo(path),
    "folder": lambda path, data: path.mkdir(),
    "link": lambda path, data: path.symlink_to("/dev/zero"),
    "socket": lambda path, data: bind(path),
}  # fmt: skip


def bind(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def cut(data, length):
    """Return the first bytes of a ledger, with the length in its head."""
    magic, _, pool_id, num_text = ledger_module._HEAD.unpack_from(data)
    return (ledger_module._HEAD.pack(magic, length, pool_id, num_text) + data[ledger_module._HEAD.size :])[:length]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["ledger", "owner.lock", "pool", "lock"])
def test_broken_file_stops_no_other_owner(node, kind, name, tmp_path):
    folder = node_folder(f"test-{uuid.uuid4().hex[:12]}")
    try:
        (folder / "owner.lock").touch()
        data = make_ledger(tmp_path / "whole")
        (folder / name).unlink(missing_ok=True)
        HOSTILE[kind](folder / name, data)
        if name == "ledger":
            assert (read_ledger(folder / "ledger").fault, read_ledger(folder / "ledger").processes) != ("", [])
        _remove_dead_pools(folder.parent)
        assert node(8).engine("a").owner_figures()["num_blocks"] == 8
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@settings(deadline=None)
@given(st.data())
def test_any_ledger_is_read(data):
    """Flipped bytes and cuts of a ledger: it is read as whole, or with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger")
        content = bytearray(make_ledger(path))
        first_slot = ledger_module._FIRST_SLOT
        ranges = (0, 200), (60_000, 70_000), (first_slot, len(content) - 1)
        places = st.one_of(*(st.integers(*bounds) for bounds in ranges))
        for place in data.draw(st.lists(places, max_size=8)):
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, first_slot, 40]))])
        found = read_ledger(path)
        assert found.fault or found.identity["num_blocks"] == 16


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=10))
def test_any_bytes_are_frames_or_refused(pieces):
    reader, num_bytes = FrameReader(1 << 10), 0
    with suppress(ValueError):
        for piece in pieces:
            for frame in reader.feed(piece):
                num_bytes += protocol.HEAD.size + len(frame.payload)
    assert num_bytes <= sum(map(len, pieces))


def test_long_greeting_is_refused_unread(place):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place.folder / "socket"))
        # Only the head of a greeting of 60 MiB.
        client.sendall(protocol.HEAD.pack(60 << 20, protocol.HELLO, 0, 0, 0))
        client.settimeout(30)
        assert client.recv(1) == b""
    assert place.owner.stats["dropped_clients"] == 1


def test_greeting_lists_many_leases(node, monkeypatch):
    """A greeting may name each slot of the pool, which an engine with many loads does after a restart."""
    monkeypatch.setattr(protocol, "MAX_HELLO_BYTES", 1000)
    node = node(1 << 16)
    engine = node.engine("a")
    for document in range(32):
        output = engine.prepare_store(*prompt(document, 1000))
        assert len(output.keys_to_store) == 1000
    leases = json.dumps(engine._leases())
    assert len(leases) > 180_000
    node.restart()
    assert engine.owner_figures()["num_pending"] == 32_000
    wait_for(lambda: engine._link.is_ready)


def test_dead_process_without_start_is_dead(tmp_path):
    """A process that ended before its start was read is not found alive later."""
    ledger = Ledger(tmp_path / "ledger", 16, IDENTITY)
    ledger.processes[0] = (1 << 22, -1, 0, -1)
    assert read_ledger(tmp_path / "ledger") == ("", IDENTITY, [])


def test_unknown_writers_lose_their_slots(node):
    node = node(16)
    engine = node.engine("a")
    turn(engine, *prompt(1, 4))
    engine.owner_figures()
    node.stop()
    ledger = node.owner.pool.ledger
    ledger.state[8:10], ledger.writer[8], ledger.writer[9] = 1, 99, 7
    ledger.key[8:10] = np.frombuffer(b"x".ljust(36, b"\0") + b"y".ljust(36, b"\0"), ledger.key.dtype)
    ledger.key_bytes[8:10] = 1
    ledger.readers[8] = 1
    node.start()
    engine.owner_figures()
    wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)
    figures = engine.owner_figures()
    assert (figures["num_pending"], figures["num_free"]) == (0, 12)
    node.check()
