"""The Mooncake tier on a store in this process and, as slow tests, on a real master and real store nodes.

The native client reads its time limits once in a process, so every tier here has the same.
"""

import time
from contextlib import closing, nullcontext, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import stores
from local_stores import LocalMooncake
from stores import KEYS, Impostor, MooncakeStore, found, free_port, load, store, store_until_done, wait_for

from kvcache.tiers import mooncake
from kvcache.tiers.mooncake import MooncakeOptions, MooncakeTier

TIMEOUT_S = 1.0
BLOCK_BYTES = 1 << 16


@pytest.fixture
def local(local_mooncake, monkeypatch):
    monkeypatch.setitem(globals(), "TIMEOUT_S", local_mooncake.place["timeout_s"])
    return local_mooncake


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


def open_tier(opened, master, **options):
    options = MooncakeOptions(**{"master": master, "timeout_s": TIMEOUT_S} | options)
    tier = MooncakeTier(options, stores.blocks(64, BLOCK_BYTES))
    opened.append(tier)
    return tier


def test_failed_deletion_of_epoch_is_error(local, opened, monkeypatch):
    tier = open_tier(opened, local.master)
    monkeypatch.setattr(LocalMooncake, "remove_by_regex", lambda *_: -900)
    with pytest.raises(OSError, match=r"remove failed: .*\(-900\)"):
        tier.delete_older(b"kvcache:")


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
def test_batch_waits_bounded_time_for_client(local, opened, name, move):
    tier = open_tier(opened, local.master)
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


def test_master_without_memory_is_no_store(make_store):
    store = make_store()
    assert "the epoch failed: no space" in MooncakeTier.unavailable_reason(MooncakeOptions(master=store.master))
