"""The Mooncake tier on a store in this process and, as slow tests, on a real master and real store nodes.

The native client reads its time limits once in a process, so every tier here has the same.
"""

import importlib
import os
import time
from contextlib import closing, nullcontext, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import stores
from local_stores import EXISTS, MOONCAKE, NO_SPACE, NOT_READY, LocalMooncake
from stores import (
    KEYS,
    Impostor,
    MooncakeStore,
    StoreContract,
    found,
    free_port,
    load,
    store,
    store_until_done,
    wait_for,
)

from kvcache.tiers import mooncake
from kvcache.tiers.mooncake import MooncakeOptions, MooncakeTier
from kvcache.tiers.shared_store import SEAL_BYTES

TIMEOUT_S = 1.0
BLOCK_BYTES = 1 << 16


@pytest.fixture(scope="session")
def native():
    """The class of real clients."""
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except ImportError as error:
        if os.environ.get("KVCACHE_EXPECT_STORES") == "1":
            raise
        pytest.skip(f"needs the extra 'mooncake': {error}")


@pytest.fixture
def local(monkeypatch):
    """A store in this process, whose master closes each connection."""
    monkeypatch.setattr(mooncake, "load_client", lambda _: MOONCAKE)
    # Only a real client must miss it, so a loaded machine has time.
    monkeypatch.setitem(globals(), "TIMEOUT_S", 20.0)
    monkeypatch.setattr(mooncake, "_idle_clients", {})
    with closing(Impostor(b"")) as master:
        yield SimpleNamespace(master=f"127.0.0.1:{master.port}", client_type=LocalMooncake)


@pytest.fixture(params=["local", pytest.param("real_store", marks=pytest.mark.slow)])
def shared_store(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def make_store(tmp_path, native):
    made = []

    def make(*nodes):
        made.append(MooncakeStore(tmp_path))
        for size in nodes:
            made[-1].start_node(size)
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def real_store(tmp_path_factory, native):
    store = MooncakeStore(tmp_path_factory.mktemp("store"))
    store.start_node()
    opened = []
    store_until_done(open_tier(opened, store.master, salt="until there is memory"), KEYS[:1])
    opened[0].shutdown()
    store.client_type = native
    yield store
    store.close()


def open_tier(opened, master, **options):
    options = MooncakeOptions(**{"master": master, "timeout_s": TIMEOUT_S} | options)
    tier = MooncakeTier(options, stores.blocks(64, BLOCK_BYTES))
    opened.append(tier)
    return tier


def connected(client_type, master):
    client = client_type()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master) == 0
    return client


@pytest.fixture
def client(shared_store):
    """Another client of the store, with a registered buffer."""
    native = connected(shared_store.client_type, shared_store.master)
    buffer = np.zeros(4 * BLOCK_BYTES, np.uint8)
    assert native.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0
    yield SimpleNamespace(native=native, buffer=buffer, address=buffer.ctypes.data)
    native.close()


class TestContract(StoreContract):
    tier_type = MooncakeTier

    @pytest.fixture(autouse=True)
    def _store(self, shared_store):
        self.place = {"master": shared_store.master, "timeout_s": TIMEOUT_S}

    def open_tier(self, path, host_blocks, num_blocks):
        pins = {"soft_pin": True, "soft_pin_ttl_s": 60.0}
        return MooncakeTier(MooncakeOptions(salt=str(path), **pins, **self.place), host_blocks)


def test_damaged_values_are_removed_misses(shared_store, opened, client, tmp_path):
    tier = open_tier(opened, shared_store.master, salt=str(tmp_path))
    store_until_done(tier, KEYS[:6])
    names = [tier.name_of(key) for key in KEYS[:6]]
    whole = BLOCK_BYTES + SEAL_BYTES
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
    result = load(tier, KEYS[:6])
    assert (result.error, result.done) == ("", KEYS[5:6])
    assert (tier.stats().corrupt_blocks, tier.stats().missed_blocks) == (4, 1)
    # A forced removal heeds no lease.
    assert client.native.batch_is_exist(names[:4]) == [0] * 4
    store_until_done(tier, KEYS[:6])
    assert sorted(load(tier, KEYS[:6], job_id=4).done) == KEYS[:6]


def test_unremovable_bad_value_is_reported(shared_store, opened, client, monkeypatch, caplog, tmp_path):
    tier = open_tier(opened, shared_store.master, salt=str(tmp_path))
    store_until_done(tier, KEYS[:2])
    assert client.native.remove(tier.name_of(KEYS[0]), True) == 0
    assert client.native.put_from(tier.name_of(KEYS[0]), client.address, BLOCK_BYTES) == 0
    monkeypatch.setattr(type(client.native), "batch_remove", lambda store, names, force: [-706])
    result = load(tier, KEYS[:2])
    assert (result.done, result.failed, tier.stats().corrupt_blocks) == (KEYS[1:2], KEYS[:1], 1)
    assert "remove failed" in caplog.text


@pytest.mark.parametrize(("answer", "done", "failed", "error"), [
    (EXISTS, KEYS[1:2], [], ""), (NO_SPACE, KEYS[1:2], KEYS[:1], ""), (-800, [], KEYS[:2], "transfer failed (-800)"),
])  # fmt: skip
def test_answers_to_stores_become_outcomes(local, opened, monkeypatch, answer, done, failed, error):
    tier = open_tier(opened, local.master, num_threads=1)
    monkeypatch.setattr(LocalMooncake, "batch_put_from_multi_buffers", lambda *args: [answer, 0])
    result = store(tier, KEYS[:2])
    assert (result.done, result.failed, error in result.error) == (done, failed, True)
    assert bool(error) == bool(result.error)


@pytest.mark.parametrize("answer", [NOT_READY, -900])
def test_answers_to_loads_become_outcomes(local, opened, monkeypatch, answer):
    tier = open_tier(opened, local.master, num_threads=1)
    store(tier, KEYS[:2])
    monkeypatch.setattr(LocalMooncake, "batch_get_into_multi_buffers", lambda *args: [answer] * 2)
    result = load(tier, KEYS[:2])
    counts = tier.stats()
    assert (result.done, counts.corrupt_blocks, counts.missed_blocks) == ([], 0, 2 * (answer == NOT_READY))
    assert ("master cannot be reached" in result.error) == (answer != NOT_READY)
    for name, call in (
        ("get_into", tier.read_epoch),
        ("put_from", lambda: tier.announce_epoch(tier.epoch, replace=False)),
        ("remove_by_regex", lambda: tier.delete_older(b"kvcache:")),
    ):
        monkeypatch.setattr(LocalMooncake, name, lambda *args: answer)
        with pytest.raises(OSError, match=f"failed: .*{answer}"):
            call()
    monkeypatch.setattr(LocalMooncake, "batch_is_exist", lambda *args: [1, answer])
    assert store(tier, KEYS[2:4], job_id=3).failed == KEYS[2:4]


def test_requested_copies_and_pins_reach_store(local, opened, monkeypatch):
    configs = []
    put = LocalMooncake.batch_put_from_multi_buffers
    monkeypatch.setattr(
        LocalMooncake, "batch_put_from_multi_buffers", lambda *args: (configs.append(args[-1]), put(*args))[1]
    )
    options = {"num_replicas": 2, "soft_pin": True, "soft_pin_ttl_s": 60.0, "num_threads": 1}
    store(open_tier(opened, local.master, **options), KEYS[:2])
    # The epoch, which no store may evict, and the blocks.
    wanted = SimpleNamespace(replica_num=2, data_type="kvcache", soft_pin_action="enable", soft_pin_ttl_ms=60_000)
    assert configs == [SimpleNamespace(with_hard_pin=True), wanted]


def answer(monkeypatch, name, *answers):
    """Make the first calls of a method return `answers`, after their work."""
    method, answers = getattr(LocalMooncake, name), [*answers]
    monkeypatch.setattr(
        LocalMooncake, name, lambda *args, **kw: (method(*args, **kw), answers.pop(0) if answers else 0)[1]
    )


def test_late_master_is_tried_first(local, opened, monkeypatch):
    master, trials = f"127.0.0.1:{free_port()}", []

    def try_in_a_process(setup):
        trials.append(setup)
        if len(trials) == 1:
            raise OSError("not yet")

    monkeypatch.setattr(mooncake, "_try_in_a_process", try_in_a_process)
    options = MooncakeOptions(master=master)
    assert "cannot be used" in MooncakeTier.unavailable_reason(options)
    tier = open_tier(opened, master, lend_bytes=1 << 20)
    assert "no connection" in store(tier, KEYS[:2]).error
    with closing(Impostor(b"", port=tier._master[1])):
        assert MooncakeTier.unavailable_reason(options) == ""
        answer(monkeypatch, "setup", -1)
        for _ in range(3):
            with suppress(OSError):
                tier.maintain()
    # A client that is only tried lends no memory.
    assert [(setup[2], setup[-1]) for setup in trials] == [(0, master)] * 3
    store_until_done(tier, KEYS[:2])


@pytest.mark.parametrize(("name", "move"), [("_storing", store), ("_loading", load)])
def test_batch_waits_bounded_time_for_client(shared_store, opened, tmp_path, name, move):
    tier = open_tier(opened, shared_store.master, salt=str(tmp_path))
    tier._turn_s = 0.01
    with suppress(RuntimeError), tier._turn(getattr(tier, name)):
        raise RuntimeError
    with getattr(tier, name):
        result = move(tier, KEYS[:2])
    assert (result.done, "other batches kept the client for 0.01 s" in result.error) == ([], True)
    assert move(tier, KEYS[:2], job_id=3).error == ""


def test_late_master_is_used(make_store, opened):
    late = make_store()
    late.kill_master()
    tier = open_tier(opened, late.master)
    assert "no connection" in store(tier, KEYS[:2]).error
    assert found(tier, KEYS[:2]) == 0
    late.start_master()
    late.start_node()
    store_until_done(tier, KEYS[:2])
    assert sorted(load(tier, KEYS[:2], job_id=4).done) == KEYS[:2]


@pytest.mark.parametrize("stopped", ["master", "node"])
def test_load_from_stopped_process_fails(make_store, opened, stopped):
    fresh = make_store()
    pid = {"node": fresh.start_node().pid, "master": fresh.process.pid}[stopped]
    tier = open_tier(opened, fresh.master)
    store_until_done(tier, KEYS[:4])
    turns = []
    # A load that ends before the process is stopped does not fail.
    stores.pause(pid)
    try:
        assert tier.submit_load(5, KEYS[:4], list(range(4)))
        end_s = time.monotonic() + 30
        while not (done := tier.get_finished()):
            turns.append(time.monotonic())
            assert turns[-1] < end_s
            time.sleep(0.01)
        assert done[0].done == []
        assert done[0].error or stopped == "node"
        tier.host_rows[:] = 0
    finally:
        stores.resume(pid)
    time.sleep(0.5)
    assert not tier.host_rows.any(), "host blocks of a reported job were written"
    # A call that held the lock for its second would have left one turn or two.
    assert len(turns) > 10


@pytest.fixture(params=["local", pytest.param("make_store", marks=pytest.mark.slow)])
def fresh(request):
    """A store of which no tier has been opened."""
    if request.param == "local":
        return request.getfixturevalue("local")
    store = request.getfixturevalue("make_store")("64MB")
    store.client_type = request.getfixturevalue("native")
    return store


def record_calls(client_type, monkeypatch):
    """Return a list that grows with the calls that connect or close a client."""
    calls = []

    def record(name, method):
        monkeypatch.setattr(client_type, name, lambda *args, **kw: (calls.append(name), method(*args, **kw))[1])

    for name in ("setup", "close"):
        record(name, getattr(client_type, name))
    return calls


def test_client_is_kept_for_next_tier(fresh, opened, monkeypatch):
    calls = record_calls(fresh.client_type, monkeypatch)
    tier = open_tier(opened, fresh.master)
    store_until_done(tier, KEYS[:4])
    tier.shutdown()
    if fresh.client_type is LocalMooncake:
        assert [client.regions for clients in mooncake._idle_clients.values() for client in clients] == [{}]
    again = open_tier(opened, fresh.master)
    assert sorted(load(again, KEYS[:4]).done) == KEYS[:4]
    # The client does not use the memory of the closed tier: the blocks were loaded into the second tier's.
    assert calls == ["setup"]
    # Both at once do not share one.
    third = open_tier(opened, fresh.master)
    assert found(third, KEYS[:4]) == 4
    assert calls == ["setup", "setup"]
    if fresh.client_type is LocalMooncake:
        again.shutdown()
        assert found(open_tier(opened, fresh.master, tenant="another"), KEYS[:4]) == 0


def test_refused_memory_costs_no_client(local, opened, monkeypatch):
    monkeypatch.setattr(mooncake, "_MAINTAIN_INTERVAL_S", 0.01)
    calls, put = record_calls(LocalMooncake, monkeypatch), LocalMooncake.batch_put_from_multi_buffers
    answer(monkeypatch, "register_buffer", 0, -1)
    tier = open_tier(opened, local.master)
    # The epoch may be read at any time.
    monkeypatch.setattr(LocalMooncake, "batch_put_from_multi_buffers", lambda *args: (tier.read_epoch(), put(*args))[1])
    store_until_done(tier, KEYS)
    assert load(tier, KEYS).done == KEYS
    assert calls == ["setup"]


@pytest.mark.parametrize(("answer", "is_used"), [(TimeoutError(), False), (ConnectionResetError(), True)])
def test_master_that_answers_is_used(local, opened, monkeypatch, answer, is_used):
    probe = SimpleNamespace(sendall=len, recv=Mock(side_effect=answer), getsockname=lambda: ("127.0.0.1", 1))
    monkeypatch.setattr(mooncake.socket, "create_connection", lambda *_, **options: nullcontext(probe))
    calls = record_calls(LocalMooncake, monkeypatch)
    assert bool(store(open_tier(opened, local.master), KEYS[:1]).error) != is_used
    assert calls == ["setup"] * is_used


def test_silent_master_gets_no_client(make_store, native, opened, monkeypatch):
    calls = record_calls(native, monkeypatch)
    fresh = make_store("64MB")
    stores.pause(fresh.process.pid)
    try:
        tier = open_tier(opened, fresh.master)
        assert store(tier, KEYS[:2]).error
        assert calls == []
    finally:
        stores.resume(fresh.process.pid)
    store_until_done(tier, KEYS[:2])
    assert calls == ["setup"]


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_other_protocol_causes_no_hang(opened):
    impostor = Impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    tier = open_tier(opened, f"127.0.0.1:{impostor.port}")
    # Refused as long as the tier is being opened.
    assert not tier.submit_store(1, KEYS[:2], [0, 1]) or wait_for(tier, 1).done == []
    assert found(tier, KEYS[:2]) == 0
    impostor.close()


def test_check_stores_loads_and_deletes(shared_store):
    options = MooncakeOptions(master=shared_store.master)
    assert MooncakeTier.unavailable_reason(options) == ""


def test_master_without_memory_is_no_store(make_store):
    store = make_store()
    assert "the epoch failed: no space" in MooncakeTier.unavailable_reason(MooncakeOptions(master=store.master))


CALLS = [("put_from", "epoch"), ("batch_put_from_multi_buffers", "write"), ("batch_remove", "remove")]


@pytest.mark.parametrize(("call", "reason"), CALLS)
def test_check_names_failing_call(local, monkeypatch, call, reason):
    failed = {"put_from": lambda *_: -1}.get(call, lambda self, names, *_: [-1] * len(names))
    monkeypatch.setattr(LocalMooncake, call, failed)
    assert reason in MooncakeTier.unavailable_reason(MooncakeOptions(master=local.master))
