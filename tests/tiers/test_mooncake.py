"""The Mooncake tier against a real master and real store nodes: sharing, faults, foreign values.

The native client reads its time limits once in a process, so every tier here has the same.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache import TieredOffloadingManager
from kvcache.testing.tier_contract import TierContract
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.mooncake import MooncakeTier

try:
    importlib.import_module("mooncake.store")
except ImportError as error:
    if os.environ.get("KVCACHE_EXPECT_STORES") == "1":
        raise
    pytest.skip(f"needs the extra 'mooncake': {error}", allow_module_level=True)

TIMEOUT_S = 1.0
BLOCK_BYTES = 1 << 16
KEYS = [bytes([number]) * 36 for number in range(1, 65)]
BINARIES = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Store:
    """A master, and nodes that lend it memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.master = f"127.0.0.1:{self.port}"
        self._metrics_port = free_port()
        self._log = (folder / "store.log").open("ab")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start_master()

    def start_master(self) -> None:
        self.process = self._start(
            "mooncake_master",
            f"-rpc_port={self.port}",
            "-rpc_address=127.0.0.1",
            f"-metrics_port={self._metrics_port}",
            "-enable_metric_reporting=false",
            "-default_kv_lease_ttl=200",
        )
        end_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < end_s, "the master did not start"
                time.sleep(0.02)

    def start_node(self, size: str = "64MB") -> subprocess.Popen[bytes]:
        return self._start(
            "mooncake_client",
            f"-master_server_address={self.master}",
            "-metadata_server=P2PHANDSHAKE",
            "-host=127.0.0.1",
            f"-port={free_port()}",
            f"-global_segment_size={size}",
        )

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        binary = shutil.which(name) or str(BINARIES / name)
        process = subprocess.Popen([binary, *options], stdout=self._log, stderr=self._log)
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(*nodes: str) -> Store:
        stores.append(Store(tmp_path))
        for size in nodes:
            stores[-1].start_node(size)
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    store.start_node()
    host = blocks(1)
    tier = MooncakeTier(store.master, host, salt="until there is memory", timeout_s=TIMEOUT_S)
    store_until_done(tier, host, KEYS[:1])
    tier.shutdown()
    yield store
    store.close()


@pytest.fixture
def opened() -> Iterator[list[MooncakeTier]]:
    tiers: list[MooncakeTier] = []
    yield tiers
    for tier in tiers:
        tier.shutdown()


def open_tier(opened: list[MooncakeTier], master: str, host: np.ndarray, **options) -> MooncakeTier:
    tier = MooncakeTier(master, host, **{"timeout_s": TIMEOUT_S} | options)
    opened.append(tier)
    return tier


def blocks(num_blocks: int = 64, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return np.zeros((num_blocks, block_bytes), np.uint8)


def wait_for(tier: MooncakeTier, job_id: int, timeout_s: float = 30.0):
    end_s = time.monotonic() + timeout_s
    while True:
        for result in tier.get_finished():
            if result.job_id == job_id:
                return result
        assert time.monotonic() < end_s, "the job never ended"
        time.sleep(0.002)


def found(tier: MooncakeTier, keys: list[bytes], timeout_s: float = 30.0) -> int:
    end_s = time.monotonic() + timeout_s
    while (answer := tier.lookup(keys)) is None:
        assert time.monotonic() < end_s, "no answer to a look-up"
        tier.get_finished()
        time.sleep(0.002)
    return answer


def store(tier: MooncakeTier, host: np.ndarray, keys: list[bytes], job_id: int = 1):
    for i, key in enumerate(keys):
        host[i] = key[0]
    assert tier.submit_store(job_id, keys, list(range(len(keys))))
    return wait_for(tier, job_id)


def store_until_done(tier: MooncakeTier, host: np.ndarray, keys: list[bytes], timeout_s: float = 60.0) -> None:
    """Store keys once the store has memory and answers."""
    end_s, job_id = time.monotonic() + timeout_s, 1 << 20
    while (result := store(tier, host, keys, job_id)).failed or result.error:
        assert time.monotonic() < end_s, (result, tier.stats())
        job_id += 1
        time.sleep(0.05)


def load(tier: MooncakeTier, host: np.ndarray, keys: list[bytes], job_id: int = 2):
    host[:] = 0
    assert tier.submit_load(job_id, keys, list(range(len(keys))))
    result = wait_for(tier, job_id)
    for i, key in enumerate(keys):
        assert key not in result.done or (host[i] == key[0]).all(), "wrong bytes"
    assert not host[len(keys) :].any(), "a block of no job was touched"
    return result


@pytest.fixture
def client(shared_store: Store) -> Iterator[SimpleNamespace]:
    """A client of the store that is none of ours, with a registered buffer."""
    native = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", shared_store.master) == 0
    buffer = np.zeros(4 * BLOCK_BYTES, np.uint8)
    assert native.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0
    yield SimpleNamespace(native=native, buffer=buffer, address=buffer.ctypes.data)
    native.close()


class TestContract(TierContract):
    evicts = False
    is_bounded = False
    survives_restart = True

    @pytest.fixture(autouse=True)
    def _store(self, shared_store):
        self.master = shared_store.master

    def open_tier(self, path: Path, host_blocks, num_blocks: int) -> MooncakeTier:
        return MooncakeTier(self.master, host_blocks, salt=str(path), timeout_s=TIMEOUT_S)


def test_second_engine_finds_what_the_first_stored(shared_store, opened, tmp_path):
    host_a, host_b = blocks(), blocks()
    options = {"salt": str(tmp_path), "fingerprint": {"model": "m"}}
    first = open_tier(opened, shared_store.master, host_a, **options)
    second = open_tier(opened, shared_store.master, host_b, **options)
    store_until_done(first, host_a, KEYS)
    assert found(second, KEYS) == len(KEYS)
    assert sorted(load(second, host_b, KEYS).done) == KEYS
    # What the second engine offers is there: nothing is sent, and the job names none of it.
    result = store(second, host_b, KEYS[:8], job_id=3)
    assert (result.done, result.failed, second.stats().stored_blocks) == ([], [], 0)


@pytest.mark.parametrize("other", [{"fingerprint": {"model": "other"}}, {"salt": "another tenant"}])
def test_other_models_and_tenants_share_nothing(shared_store, opened, other, tmp_path):
    host = blocks()
    options = {"salt": str(tmp_path), "fingerprint": {"model": "m"}}
    store_until_done(open_tier(opened, shared_store.master, host, **options), host, KEYS[:4])
    stranger = open_tier(opened, shared_store.master, blocks(), **(options | other))
    assert found(stranger, KEYS[:4]) == 0


def test_damaged_values_are_counted_misses_that_are_removed(shared_store, opened, client, tmp_path):
    host = blocks()
    tier = open_tier(opened, shared_store.master, host, salt=str(tmp_path))
    store_until_done(tier, host, KEYS[:6])
    names = [tier.name_of(key) for key in KEYS[:6]]
    whole = BLOCK_BYTES + 8
    for name, source, num_bytes in (
        (names[0], names[0], whole - 1),  # short
        (names[1], names[1], whole + 1),  # long
        (names[2], names[3], whole),  # another block's
    ):
        assert client.native.get_into(source, client.address, whole) == whole
        assert client.native.remove(name, True) == 0
        assert client.native.put_from(name, client.address, num_bytes) == 0
    assert client.native.get_into(names[3], client.address, whole) == whole
    client.buffer[100] ^= 1  # torn
    assert client.native.remove(names[3], True) == 0
    assert client.native.put_from(names[3], client.address, whole) == 0
    assert client.native.remove(names[4], True) == 0  # gone
    result = load(tier, host, KEYS[:6])
    assert (result.error, result.done) == ("", KEYS[5:6])
    assert (tier.stats().corrupt_blocks, tier.stats().missed_blocks) == (4, 1)
    end_s = time.monotonic() + 30
    # A lease of whoever read them, or asked for them, keeps them for a moment.
    while any(client.native.batch_is_exist(names[:4])):
        assert time.monotonic() < end_s
        time.sleep(0.7)
    store_until_done(tier, host, KEYS[:6])
    assert sorted(load(tier, host, KEYS[:6], job_id=4).done) == KEYS[:6]


def test_reset_is_not_undone_by_a_restart(shared_store, opened, tmp_path):
    host = blocks()
    tier = open_tier(opened, shared_store.master, host, salt=str(tmp_path))
    store_until_done(tier, host, KEYS[:4])
    tier.reset()
    end_s = time.monotonic() + 30
    while tier.stats().unavailable_reason:
        assert time.monotonic() < end_s
        tier.get_finished()
    assert found(tier, KEYS[:4]) == 0
    store_until_done(tier, host, KEYS[4:6])
    again = open_tier(opened, shared_store.master, blocks(), salt=str(tmp_path))
    assert found(again, KEYS[:4]) == 0
    assert found(again, KEYS[4:6]) == 2


def test_full_store_refuses_or_evicts_and_never_errs(make_store, opened):
    store_of_16 = make_store("16MB")
    host = blocks(64, 1 << 20)
    tier = open_tier(opened, store_of_16.master, host)
    store_until_done(tier, host, KEYS[:1])
    result = store(tier, host, KEYS[:40], job_id=7)
    assert result.error == ""
    assert result.done
    assert result.failed
    loaded = load(tier, host, KEYS[:40], job_id=8)
    assert loaded.error == ""
    assert loaded.done
    # What was refused at first is taken once the store has evicted for it.
    store_until_done(tier, host, KEYS[40:48])


def test_soft_pins_and_replicas_are_asked_for(make_store, opened):
    replicated = make_store("32MB", "32MB")
    host = blocks()
    options = {"num_replicas": 2, "soft_pin": True, "soft_pin_ttl_s": 60.0}
    tier = open_tier(opened, replicated.master, host, **options)
    store_until_done(tier, host, KEYS[:8])
    native = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", replicated.master) == 0
    counts = [len(native.get_replica_desc(tier.name_of(key))) for key in KEYS[:8]]
    native.close()
    # The first ones may have come before the second node did.
    assert counts[-1] in (1, 2)
    end_s, number = time.monotonic() + 30, 8
    while True:
        store_until_done(tier, host, KEYS[number : number + 1])
        native = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", replicated.master) == 0
        num_replicas = len(native.get_replica_desc(tier.name_of(KEYS[number])))
        native.close()
        if num_replicas == 2:
            break
        number += 1
        assert time.monotonic() < end_s
        assert number < len(KEYS)


def test_master_that_is_down_at_the_start_is_used_once_it_runs(make_store, opened):
    late = make_store()
    late.process.kill()
    late.process.wait()
    host = blocks()
    tier = open_tier(opened, late.master, host)
    assert "no connection" in store(tier, host, KEYS[:2]).error
    assert found(tier, KEYS[:2]) == 0
    late.start_master()
    late.start_node()
    store_until_done(tier, host, KEYS[:2])
    assert sorted(load(tier, host, KEYS[:2], job_id=4).done) == KEYS[:2]


def test_restarted_master_is_used_again(make_store, opened):
    fresh = make_store("64MB")
    host = blocks()
    tier = open_tier(opened, fresh.master, host)
    store_until_done(tier, host, KEYS[:8])
    fresh.process.kill()
    fresh.process.wait()
    for job_id in range(2, 4):
        assert load(tier, host, KEYS[:8], job_id).done == []
    fresh.start_master()
    store_until_done(tier, host, KEYS[8:16], timeout_s=60)
    assert sorted(load(tier, host, KEYS[8:16], job_id=9).done) == KEYS[8:16]


def test_stopped_master_and_node_fail_jobs_in_time(make_store, opened):
    fresh = make_store()
    node = fresh.start_node()
    host = blocks()
    tier = open_tier(opened, fresh.master, host)
    for pid, keys in ((fresh.process.pid, KEYS[:8]), (node.pid, KEYS[8:16])):
        # The master may have given up a node that could not report to it.
        store_until_done(tier, host, keys, timeout_s=60)
        os.kill(pid, signal.SIGSTOP)
        try:
            result = load(tier, host, keys)
            assert result.done == []
            assert result.error or pid == node.pid
            # Nothing may be written to host blocks of a job that was reported.
            host[:] = 0
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        assert not host.any()
    store_until_done(tier, host, KEYS[16:24], timeout_s=60)
    assert sorted(load(tier, host, KEYS[16:24], job_id=9).done) == KEYS[16:24]


def test_scheduler_never_waits_for_a_stopped_master(make_store, opened):
    fresh = make_store("64MB")
    host = blocks()
    tier = open_tier(opened, fresh.master, host)
    store_until_done(tier, host, KEYS[:4])
    manager = TieredOffloadingManager(16, 64, [(tier, TierConfig(deadline_s=0.5))], deadline_s=0.5)
    os.kill(fresh.process.pid, signal.SIGSTOP)
    longest_s = 0.0
    try:
        for i in range(40):
            for call in (
                lambda i=i: manager.lookup([KEYS[i]]),
                lambda i=i: manager.prepare_store([KEYS[i]]),
                lambda i=i: manager.complete_store([KEYS[i]]),
                manager.on_schedule_end,
            ):
                start_s = time.thread_time()
                call()
                longest_s = max(longest_s, time.thread_time() - start_s)
    finally:
        os.kill(fresh.process.pid, signal.SIGCONT)
    assert longest_s < 0.05


def test_calls_of_the_client_leave_the_interpreter_to_others(make_store, opened):
    fresh = make_store("64MB")
    host = blocks()
    tier = open_tier(opened, fresh.master, host)
    store_until_done(tier, host, KEYS[:4])
    turns = []
    os.kill(fresh.process.pid, signal.SIGSTOP)
    try:
        # A signal takes a moment: what is loaded meanwhile does not fail.
        while Path(f"/proc/{fresh.process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.001)
        assert tier.submit_load(5, KEYS[:4], list(range(4)))
        end_s = time.monotonic() + 30
        while not (done := tier.get_finished()):
            turns.append(time.monotonic())
            assert turns[-1] < end_s
            time.sleep(0.01)
    finally:
        os.kill(fresh.process.pid, signal.SIGCONT)
    assert done[0].error
    # A call that held the lock for its second would have left one turn or two.
    assert len(turns) > 10


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_protocol_on_the_port_is_no_hang(opened, greeting):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
                with client:
                    client.sendall(greeting)
                    client.recv(1 << 16)
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()
    host = blocks()
    tier = open_tier(opened, f"127.0.0.1:{listener.getsockname()[1]}", host)
    # Refused as long as the tier is being opened.
    assert not tier.submit_store(1, KEYS[:2], [0, 1]) or wait_for(tier, 1).done == []
    assert found(tier, KEYS[:2]) == 0
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a mooncake tier needs 'master'"),
        ({"master": "nowhere"}, "master must be 'host:port', got 'nowhere'"),
        ({"master": "127.0.0.1:1", "replicas": 2}, "unknown options of a mooncake tier: replicas"),
        ({"master": "127.0.0.1:1", "num_replicas": 0}, "num_replicas in a mooncake tier must be a whole number >= 1"),
        ({"master": "127.0.0.1:1", "protocol": "ib"}, "protocol in a mooncake tier must be one of tcp, rdma, got 'ib'"),
    ],
)
def test_bad_options_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        MooncakeTier.from_config(options, blocks(), {})
