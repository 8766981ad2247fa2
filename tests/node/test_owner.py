"""The owner process: refusals, broken clients, outages, recovery and its end."""

import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from node_harness import BLOCK_BYTES, key_of, prompt, turn, wait_for
from waiting import kill_and_wait

from kvcache import ReqContext
from kvcache.block import READY
from kvcache.control.telemetry import Telemetry
from kvcache.epoch import Epoch
from kvcache.exporters.status import StatusServer
from kvcache.metrics import samples_of
from kvcache.node import owner as owner_module
from kvcache.node import protocol
from kvcache.node.batch import pack_keys
from kvcache.node.client import NodeManager, greeting, register_worker
from kvcache.node.ledger import MAX_ENGINES, OWNER, Ledger
from kvcache.node.owner import Owner
from kvcache.node.protocol import node_folder, pack, unpack_keys
from kvcache.transfer.shared_file import SharedBlocks, private_folder

KILLS = Path(__file__).parents[1] / "isolated" / "node_kills.py"


@pytest.fixture
def folder():
    path = node_folder(f"test-{os.getpid()}-{time.monotonic_ns()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_other_engines_are_refused_by_difference(place):
    place.engine("a")
    with pytest.raises(ValueError, match=r"block_size: the pool has 16, this engine 32; model: .*; num_blocks: "):
        place.engine("b", block_size=32, model="other", num_blocks=32)
    with pytest.raises(ValueError, match=r"cache_policy: the pool has 'lru', this engine 'arc'; tiers: "):
        place.engine("b", options={"cache_policy": "arc", "tiers": []})
    register_worker(place.folder, greeting("c", place.identity, place.options, rank=0), 64, BLOCK_BYTES).close()
    with pytest.raises(ValueError, match=r"the workers of ranks \[1\] do not map this pool"):
        place.engine("c", num_workers=2)
    assert place.owner.stats["refused_clients"] == 3


def test_pool_that_mismatches_is_refused(node):
    node = node(1 << 29)
    with pytest.raises(ValueError, match="does not fit into host memory"):
        node.engine("a", block_bytes=1 << 30)
    with pytest.raises(ValueError, match="unknown policy"):
        node.engine("a", {"cache_policy": "nothing"}, num_blocks=4)
    assert node.engine("a", num_blocks=4).owner_figures()["num_blocks"] == 4


def test_second_owner_and_65th_engine_fail(place):
    with pytest.raises(ValueError, match="another process owns the pool"):
        Owner(place.folder)
    for number in range(MAX_ENGINES):
        place.engine(f"engine-{number}")
    with pytest.raises(ValueError, match="64 engines use this pool, and no more can"):
        place.engine("one more")


def test_exhausted_file_descriptors_refuse_clients(place):
    place.engine("a")
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    fds, before = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                fds.append(os.dup(0))
        sock.connect(str(place.folder / "socket"))
        assert sock.recv(1) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in [*fds, sock.detach()]:
            os.close(fd)
    assert place.owner.stats["refused_clients"] == 1
    assert place.engine("b").owner_figures()["refused_clients"] == 1


def test_differences_show_no_secrets():
    pool, engine = ({"tiers": [{"url": f"valkey://u:{word}@h", "password": word}]} for word in ("first", "second"))
    (text,) = protocol.differences(pool, engine)
    assert "first" not in text
    assert "second" not in text


def test_other_user_is_refused(place, monkeypatch):
    monkeypatch.setattr(owner_module, "os", SimpleNamespace(**{**vars(os), "geteuid": lambda: os.geteuid() + 1}))
    with pytest.raises(
        ValueError, match=f"the pool belongs to user {os.geteuid() + 1}, this process to user {os.geteuid()}"
    ):
        place.engine("a")


def test_removed_pool_file_is_refused(node):
    node = node(8)
    node.engine("a")
    (node.folder / "pool").unlink()
    with pytest.raises(ValueError, match=r"pool was removed while its owner, process \d+, runs"):
        register_worker(node.folder, greeting("b", node.identity, node.options, 0), 8, BLOCK_BYTES)
    assert not (node.folder / "pool").exists()


@pytest.mark.parametrize("kind", ["used", "unused", "removed"])
def test_retired_owner_leaves_used_files_only(node, kind, monkeypatch):
    monkeypatch.setattr(owner_module, "_RETIRE_S", 0.1 if kind == "used" else 60)
    node = node(8)
    if kind == "used":
        node.engine("a")
    else:
        node.owner._check_pool(greeting("a", node.identity, node.options))
    if kind == "removed":
        shutil.rmtree(node.folder)
    node.owner.retire()
    node.thread.join(10)
    assert not node.thread.is_alive()
    node.folder.mkdir(0o700, exist_ok=True)
    assert [(node.folder / name).exists() for name in ("pool", "ledger")] == [kind == "used"] * 2


@pytest.mark.parametrize("kind", ["dead", "service", "engine", "mapped"])
def test_owner_start_removes_dead_pools(node, kind):
    """A killed owner's pool is removed if no service, engine or copy of any container needs it."""
    dead = node(8)
    if kind == "engine":
        dead.engine("a")
    else:
        dead.owner._check_pool(greeting("a", dead.identity, dead.options))
    dead.stop()
    dead.owner.pool = None  # its mapping ends with the process
    gc.collect()
    os.truncate(dead.folder / "owner.lock", kind == "service")
    pool = SharedBlocks(dead.folder / "pool", 8, BLOCK_BYTES, is_owner=False) if kind == "mapped" else None
    node(8)
    assert [(dead.folder / name).exists() for name in ("pool", "ledger", ".")] == [kind != "dead"] * 3
    if pool is not None:
        pool.close()


@pytest.mark.parametrize("mode", [0o750, 0o707])
def test_folder_open_to_others_is_refused(folder, mode):
    folder.chmod(mode)
    with pytest.raises(ValueError, match="is open to other users"):
        node_folder(folder.name.removeprefix("node-"))
    folder.chmod(0o700)
    with pytest.raises(ValueError, match="node_pool must be true or a name"):
        node_folder("../a")


def _frames(node):
    """Return messages that no engine sends, by what is wrong with them."""
    text = json.dumps({**greeting("bad", node.identity, node.options), "leases": []})
    hello = pack(protocol.HELLO, 0, 0, text.encode())
    twice = pack(protocol.HELLO, 0, 0, text.replace("[]", "[[1, [], []], [1, [], []]]").encode())
    key = struct.pack("<I", 1) + b"k" * 36
    offer = pack(protocol.OFFER, 0, 1, key, 36)
    return {
        "too long": struct.pack("<IBBHI", 1 << 31, 1, 0, 0, 0),
        "too short": struct.pack("<IBBHI", 7, 1, 0, 0, 0),
        "unknown": hello + pack(77),
        "before the greeting": pack(protocol.ACQUIRE, 0, 1, struct.pack("<I", 0) + key, 36),
        "greeting cut": pack(protocol.HELLO, 0, 0, text[:-1].encode()),
        "no list of leases": pack(protocol.HELLO, 0, 0, text.replace("[]", "[1]").encode()),
        "keys cut": hello + pack(protocol.OFFER, 0, 1, key[:-1], 36),
        "keys too long": hello + pack(protocol.OFFER, 0, 1, struct.pack("<I", 1) + b"k" * 64, 64),
        "slots of others": hello + pack(protocol.STORED, 1, 1, struct.pack("<Ii", 1, 0)),
        "no slots": hello + pack(protocol.STORED, 1, 1, struct.pack("<Ii", 1, -5)),
        "keys of other slots": hello + pack(protocol.STORED, 1, 1, struct.pack("<I", 0) + key, 36),
        "unknown hint": hello + pack(protocol.OPEN, 0, 1, b'[["kv.fetch"]]'),
        "invalid next use": hello + pack(protocol.OPEN, 0, 1, b'[["kv.retain", "x"]]'),
        "list as a session": hello + pack(protocol.OPEN, 0, 1, b'[["kv.prefetch", null, [1]]]'),
        "half a slot": hello + pack(protocol.STORED, 1, 1, b"abc"),
        "another's lease": hello + pack(protocol.RELEASE, 0, 1) + pack(protocol.STORED, 0, 1, struct.pack("<Ii", 1, 3)),
        "a request twice": twice,
        "a greeting twice": hello + hello,
        "a slot twice": hello + offer + pack(protocol.STORED, 1, 1, struct.pack("<3i", 2, 4, 4)),
    }  # fmt: skip


def test_unread_answers_arrive_later(place):
    place.engine("a")
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(place.folder / "socket"))
    with sock:
        # More than the buffer of a socket takes.
        sock.sendall(b"".join(pack(protocol.STATS, 0, number) for number in range(4000)))
        wait_for(lambda: place.owner.stats["frames"] > 4000)
        reader, frames = protocol.FrameReader(), []
        sock.settimeout(30)
        while len(frames) < 4000:
            frames += reader.feed(sock.recv(1 << 16))
    assert [frame.request for frame in frames] == list(range(4000))


def test_broken_client_is_dropped_alone(place, engine):
    keys, context = prompt(1, 4)
    output = engine.prepare_store(keys, context)
    for number, (kind, data) in enumerate(_frames(place).items(), 1):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place.folder / "socket"))
            client.settimeout(5)
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(client, [data], [pidfd])
            os.close(pidfd)
            while client.recv(1 << 16):
                pass
        assert place.owner.stats["dropped_clients"] == number, kind
    # A client that dies between connect and greeting.
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place.folder / "socket"))
    wait_for(lambda: place.owner.stats["dropped_clients"] == number + 1)
    engine.complete_store(output.keys_to_store, context)
    assert engine.lookup(*prompt(1, 4)) == 4
    assert engine.owner_figures()["num_pending"] == 1
    assert [*place.leases.engines[1].writing] == [4]
    place.check()


def test_client_that_reads_nothing_is_dropped(node, monkeypatch):
    monkeypatch.setattr(owner_module, "_MAX_OUTBOX_BYTES", 1 << 18)
    node = node(64)
    engine = node.engine("a")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node.folder / "socket"))
        with suppress(ConnectionError):
            for _ in range(100):
                client.sendall(pack(protocol.STATS) * 100)
        # Its end alone would not be counted.
        end_s = time.monotonic() + 60
        while engine.owner_figures()["dropped_clients"] != 1:
            assert time.monotonic() < end_s


def test_second_scheduler_of_process_leaves_leases(place, engine):
    turn(engine, *prompt(1, 8))
    assert engine.lookup(*prompt(1, 8)) == 8
    with pytest.raises(ValueError, match=rf"engine 'a' has a scheduler in process {os.getpid()}"):
        place.engine("a")
    assert engine.owner_figures()["num_referenced"] == 8


def test_forked_client_does_not_ask(engine):
    turn(engine, *prompt(1, 8))
    child = os.fork()
    if child == 0:
        engine.on_schedule_end()
        os._exit(engine.lookup(*prompt(1, 8)) or int(engine._link._sock or engine.owner_figures() is not None))
    assert os.waitpid(child, 0)[1] == 0
    assert engine.lookup(*prompt(1, 8)) == 8


def test_ledger_is_written_before_answers(place, engine, monkeypatch):
    """What a client knows of its slots is in the ledger when the answer leaves."""
    ledger, send = place.owner.pool.ledger, Owner._send
    seen = []

    def spy(owner, connection, data):
        for frame in protocol.FrameReader().feed(data):
            if frame.op == protocol.SLOTS:
                slots = np.frombuffer(frame.payload, "<i4", -1, 4).tolist()
                seen.append([int(ledger.state[slot]) for slot in slots] == [1] * len(slots) and slots != [])
            elif frame.op == protocol.HELD and len(frame.payload) > 4:
                slots = np.frombuffer(frame.payload, "<i4", -1, 4).tolist()
                seen.append(all(ledger.readers[slot] for slot in slots))
        send(owner, connection, data)

    monkeypatch.setattr(Owner, "_send", spy)
    turn(engine, *prompt(1, 8))
    assert engine.lookup(*prompt(1, 8)) == 8
    assert seen == [True, True]


def test_new_meaning_needs_new_magic(tmp_path):
    """Whoever changes a field of the ledger or what it means draws a new magic, and writes the new digest here."""
    ledger = Ledger(tmp_path / "ledger", 4, {"num_blocks": 4, "block_bytes": 8})
    epoch = Epoch.of_version("step-1").digest()
    _, payload, key_bytes = pack_keys([key_of(1, place) for place in range(3)])
    keys, _ = unpack_keys(payload, key_bytes, epoch=epoch)
    ledger.begin([0, 2], keys[:2], 5)
    ledger.begin([1], keys[2:], OWNER)
    ledger.end([0, 1], READY)
    ledger.readers[0] |= np.uint64(1 << 5)
    ledger.names[5] = b"engine"
    ledger.processes[0] = (1, 2, 5, -1)
    content = (tmp_path / "ledger").read_bytes()
    magic, digest = content[:8], hashlib.sha256(content[8:16] + content[32:]).hexdigest()[:16]
    assert (magic, digest) == (b"KVNODE04", "38533b1d91f962f3")


@pytest.mark.parametrize(
    "damage", ["truncated", "another version", "pool missing", "none", "identity", *("state", "stamp", "key", "engine")]
)
def test_new_owner_keeps_whole_pool_only(place, engine, damage):
    for document in (1, 2, 1):
        turn(engine, *prompt(document, 20))
    engine.owner_figures()
    place.owner.pool.manager.pool.reserve([key_of(8, 0)], is_move=True)  # a promotion, which the kill ends
    place.stop()
    ledger = place.folder / "ledger"
    if damage == "truncated":
        os.truncate(ledger, ledger.stat().st_size - 1)
    elif damage == "another version":
        ledger.write_bytes(ledger.read_bytes().replace(b"KVNODE04", b"KVNODE03", 1))
    elif damage == "identity":
        ledger.write_bytes(ledger.read_bytes().replace(b'{"block', b"{+block", 1))
    elif damage in ("state", "stamp", "key", "engine"):
        place.owner.pool.ledger.processes["engine"][0] |= (damage == "engine") << 20
        place.owner.pool.ledger.state[1] |= (damage == "state") << 6
        place.owner.pool.ledger.stamp[1] |= np.uint64((damage == "stamp") << 63)
        place.owner.pool.ledger.key[int(damage == "key")] = place.owner.pool.ledger.key[0]
    elif damage == "pool missing":
        (place.folder / "pool").unlink()
    place.start()
    engine.status(key_of(9, 9), ReqContext())
    wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready or engine.refusal)
    if damage == "none":
        # The blocks in the first slots were used last.
        hits = [turn(engine, *prompt(*item)) for item in ((3, 30), (1, 20), (2, 20))]
        assert hits == [0, 20, 14]
        assert engine.owner_figures()["num_pending"] == 0
        place.check()
    else:
        assert "the pool was made anew" in engine.refusal
        engine._link.retry_s = 0.0
        engine.on_schedule_end()
        assert not engine._link._sock
        assert engine.lookup(*prompt(1, 20)) == 0
        assert place.engine("b").lookup(*prompt(1, 20)) == 0


def test_owner_outage_delays_engine_once(folder):
    """A stopped owner, then a killed one: one call waits for at most 50 ms, then all miss until it is back."""
    identity = {"num_blocks": 256, "block_bytes": 64, "block_size": 16}
    engine = NodeManager(folder, greeting("a", identity, {"cache_policy": "lru"}))
    turn(engine, *prompt(1, 20))
    held = prompt(1, 20)
    assert wait_for(lambda: engine.on_schedule_end() or engine.lookup(*prompt(1, 20))) == 20
    assert engine.lookup(*held) == 20
    for end, again in ((signal.SIGSTOP, signal.SIGCONT), (signal.SIGKILL, None)):
        pid = wait_for(lambda: engine.on_schedule_end() or engine.owner_figures())["pid"]
        os.kill(pid, end)
        times = []
        for _ in range(20):
            start_s = time.monotonic()
            assert engine.lookup(*prompt(1, 20)) == 0
            assert engine.prepare_store([key_of(2, 0)], ReqContext()) is None
            engine.on_schedule_end()
            times.append(time.monotonic() - start_s)
            if again is None and engine._link.is_ready:
                break
        # On a busy machine any step may be slow. But if every call waited, no step would be shorter than 50 ms.
        assert len(times) < 4 or sorted(times)[len(times) // 4] < 0.045
        assert max(times) < 20
        if again:
            os.kill(pid, again)
        wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)
        assert wait_for(lambda: engine.on_schedule_end() or engine.lookup(*prompt(1, 20))) == 20
    assert engine.parts()[1].stats.outages >= 2
    slots = engine.prepare_load(*held).block_ids.tolist()
    assert len(slots) == 20
    engine.complete_load(*held)
    figures = wait_for(lambda: engine.on_schedule_end() or engine.owner_figures())
    engine.shutdown()
    kill_and_wait(figures["pid"], signal.SIGTERM)


@pytest.mark.slow
def test_owner_process_without_engines_ends(folder):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvcache.node import owner\n"
        "serving = owner.Owner(Path(sys.argv[1]), linger_s=None)\n"
        "while serving.pool is None: serving.step(0.1)\n"
        "serving._linger_s = 0.5\n"
        "serving.run()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'vllm') or 'kvcache.lab' in name])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    wait_for((folder / "socket").exists)
    engine_code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvcache.node.client import NodeManager, greeting\n"
        "identity = {'num_blocks': 4, 'block_bytes': 64, 'block_size': 16}\n"
        "NodeManager(Path(sys.argv[1]), greeting('a', identity, {'cache_policy': 'lru'}), starts_owner=False)\n"
    )
    subprocess.run([sys.executable, "-c", engine_code, str(folder)], check=True)
    assert process.communicate(timeout=100)[0] == "[]\n"
    assert not folder.exists()


@pytest.mark.timeout(900)
def test_kills_amid_copies_lose_nothing(tmp_path):
    name = f"test-kills-{os.getpid()}"
    words = [sys.executable, str(KILLS), name, "8", "4", str(tmp_path / "disk")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["wrong"] == 0


@pytest.mark.slow
def test_service_keeps_blocks_without_engines(tmp_path):
    pytest.importorskip("typer")
    # Where another process finds it.
    folder = private_folder() / f"node-test-{os.getpid()}"
    extra_config = {"node_pool": folder.name.removeprefix("node-"), "cpu_bytes_to_use": "1GiB", "cache_policy": "arc"}
    config = tmp_path / "kvcache.json"
    # The file that `kvcache check` reads: a configuration of vLLM itself.
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra_config}
    config.write_text(json.dumps({"kv_transfer_config": transfer}))
    for _ in range(2):
        service = subprocess.Popen([sys.executable, "-m", "kvcache", "node", str(config)], stdout=subprocess.DEVNULL)
        wait_for((folder / "socket").exists)
        identity = {"num_blocks": 64, "block_bytes": 64, "block_size": 16}
        with pytest.raises(ValueError, match="cache_policy: the pool has 'arc', this engine 'lru'"):
            NodeManager(folder, greeting("a", identity, {"cache_policy": "lru"}), starts_owner=False)
        engine = NodeManager(folder, greeting("a", identity, {"cache_policy": "arc"}), starts_owner=False, patience_s=5)
        hits = turn(engine, *prompt(1, 20))
        engine.owner_figures()
        engine.shutdown()
        service.terminate()
        assert service.wait(100) == 0
        (folder / "socket").unlink()
    shutil.rmtree(folder)
    assert hits == 20


def test_status_and_top_show_each_engine(node, run, sockets, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    node = node(64, {"cache_policy": "lru", "exporters": ["status"]})
    first, second = node.engine("a"), node.engine("b")
    turn(first, *prompt(1, 24))
    assert second.lookup(*prompt(1, 24)) == 24
    first._link.lose(OSError("planted"))
    wait_for(lambda: first.on_schedule_end() or first._link.is_ready)
    first.prepare_store([key_of(2, 0)], ReqContext())
    # The engine's own socket beside the owner's.
    second.telemetry = Telemetry(second)
    path = sockets / f"kvcache-{os.geteuid()}" / "status-1.sock"
    second.telemetry.exporters.append(StatusServer(second.telemetry, path))
    shown = [" ".join(line.split()) for line in run("status")[1].splitlines()]
    named = ("process", "held_blocks", "writing_blocks", "shared_hit_blocks", "round_trips", "outages")
    for number, values in ((0, (os.getpid(), 0, 1, 0, 3, 1)), (1, (os.getpid(), 24, 0, 24, 1, 0))):
        for name, value in zip(named, values, strict=True):
            assert f"engine {number} {name} {value}" in shown
    shown = [" ".join(line.split()) for line in run("top", "--once", "--interval", "0.1")[1].splitlines()]
    assert shown[-5:-2] == [
        "engine holds writes others' blocks found/s in all messages/s outages", "0 0 1 0 0 0 1", "1 24 0 0 24 0 0",
    ]  # fmt: skip


def test_top_shows_use_of_pool(node):
    view = pytest.importorskip("kvcache.cli.top").view
    frames, console = pytest.importorskip("kvcache.cli.frames"), pytest.importorskip("rich.console").Console(width=100)
    engine = node(64).engine("a")
    turn(engine, *prompt(1, 24))
    for reason in ("", "node's pool: unavailable; "):
        samples = [sample for part in engine.parts() for sample in samples_of(part)]
        history = frames.History()
        history.add(frames.Frame(0.0, {(sample.name, sample.labels): sample.value for sample in samples}))
        with console.capture() as captured:
            console.print(view("x", history, None))
        expected = f"0 messages/s, {int(bool(reason))} outages; 0 blocks/s found that other engines stored"
        assert (reason or "node's pool: ") + expected in captured.get()
        engine._link.lose(OSError("planted"))
