"""Engines of one node: shared hits, leases, resets, and the ledger after each call."""

import json
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from node_harness import gated, key_of, prompt, turn, wait_for

from kvcache import CPUOffloadingManager, ReqContext, Retention
from kvcache.node import protocol
from kvcache.node.batch import HeldBlocks, pack_keys

HERE = Path(__file__)


def test_held_blocks_answer_in_any_order():
    keys = [key_of(1, place) for place in range(6)]
    held = HeldBlocks()
    assert held.add(keys[:4], np.array([9, 8, -1, 7], "<i4").tobytes()) == 3
    assert [key in held for key in keys] == [True, True, False, True, False, False]
    assert held.add(keys[4:], np.array([6, 5], "<i4").tobytes()) == 2
    equal = [bytes(bytearray(key)) for key in keys]
    for asked, slots in (([0, 1, 3, 4, 5], [9, 8, 7, 6, 5]), ([5, 3, 3, 0], [5, 7, 7, 9]), ([], [])):
        for objects in (keys, equal):
            assert held.load_spec([objects[place] for place in asked]).block_ids.tolist() == slots
    with pytest.raises(KeyError):
        held.load_spec(keys[:3])
    held.clear()
    assert keys[0] not in held


def test_packed_keys_are_of_one_length():
    keys = [key_of(1, place) for place in range(4)]
    for packed, num_ends in ((pack_keys(keys, 1), 0), (pack_keys(dict.fromkeys(keys, 16), 1), 3)):
        assert (packed[0], packed[2]) == (keys[1:], len(keys[0]))
        assert packed[1] == np.array([3] + [16] * num_ends, "<u4").tobytes() + b"".join(keys[1:])
    assert pack_keys([])[1:] == (bytes(4), 1)
    for invalid in ([b"a", b"bc"], [bytes(37)], [b"a", bytearray(b"b")]):
        with pytest.raises(ValueError, match="one length"):
            pack_keys(invalid)


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_engines_in_turns_hit_as_one(node, policy):
    node = node(96, {"cache_policy": policy})
    engines = [node.engine("a"), node.engine("b")]
    times = [0.0]
    node.owner.pool.manager.clock = lambda: times[0]
    alone = CPUOffloadingManager(16, 96, policy, clock=lambda: times[0])
    dice = random.Random(1)
    hits = [0, 0]
    for step in range(400):
        document, length = min(int(dice.expovariate(0.3)), 20), dice.randint(1, 24)
        hint = Retention(dice.choice(["end", None, None, "soon"]))
        hits[0] += turn(engines[step % 2], *prompt(document, length, retention=hint))
        hits[1] += turn(alone, *prompt(document, length, retention=hint))
        assert hits[0] == hits[1]
        engines[step % 2].owner_figures()
        times[0] += 1
    node.check()
    assert sum(engine.parts()[1].stats.shared_hit_blocks for engine in engines) > hits[0] / 4 > 50
    for name in ("loaded_blocks", "needed_blocks"):
        assert sum(getattr(engine.stats(), name) for engine in engines) == getattr(alone.stats(), name)


def test_refused_blocks_are_needed_once(engine):
    turn(engine, *prompt(1, 8))
    keys, context = prompt(1, 40)
    for _ in range(3):
        assert engine.prepare_store(keys, context) is None
        assert (engine.stats().needed_blocks, engine.stats().loaded_blocks) == (40, 0)
    assert len(engine.prepare_store(keys[:24], context).keys_to_store) == 16
    assert (engine.stats().needed_blocks, engine.stats().rejected_stores) == (40, 3)


def test_prompt_costs_one_round_trip(engine, other):
    turn(engine, *prompt(1, 24))
    keys, context = prompt(1, 32)
    assert turn(other, keys, context) == 24
    assert other.parts()[1].stats.round_trips == 2
    assert other.parts()[1].stats.shared_hit_blocks == 24
    assert (other.stats().loaded_blocks, other.stats().stored_blocks, other.stats().needed_blocks) == (24, 8, 32)
    again = prompt(1, 24)
    assert [other.lookup(*again) for _ in range(2)] == [24, 24]
    assert other.parts()[1].stats.round_trips == 3


def test_engine_holds_half_at_most(place, engine):
    keys, context = prompt(1, 40)
    assert engine.prepare_store(keys, context) is None
    turn(engine, *prompt(1, 30))
    turn(engine, *prompt(2, 30))
    held = [prompt(document, 30) for document in (1, 2)]
    assert [engine.lookup(*item) for item in held] == [30, 2]
    assert engine.prepare_store([key_of(3, 0)], ReqContext()) is None
    engine.on_request_finished(held[0][1])
    assert engine.prepare_store([key_of(3, 0)], ReqContext()) is not None
    place.check()


def test_store_after_end_ends_again(place, engine):
    """An engine stores more blocks of a finished request, while a store of it runs."""
    keys, context = prompt(1, 8)
    assert engine.prepare_store(keys[:4], context)
    engine.on_request_finished(context)
    assert engine.prepare_store(keys[4:], context)
    assert engine.prepare_load([], context).block_ids.tolist() == []
    engine.complete_load([], context)
    for part in (keys[:4], keys[4:]):
        engine.complete_store(part, context)
    assert engine.owner_figures()["num_pending"] == 0
    assert (dict(place.leases.engines[0].leases), engine._prompts) == ({}, {})
    place.check()


def test_block_being_written_makes_others_wait(place, monkeypatch):
    writer, reader = place.engine("a"), place.engine("b")
    keys, context = prompt(1, 4)
    writer.prepare_store(keys, context)
    other = prompt(1, 4)[1]
    assert [reader.status(keys[0], other) for _ in range(3)] == [1, 1, 1]
    monkeypatch.setattr("kvcache.node.prompt._MAX_PENDING_S", 0.1)
    wait_for(lambda: reader.status(keys[0], other) == 0)
    reader.on_request_finished(other)
    writer.complete_store(keys, context)
    writer.owner_figures()
    assert reader.lookup(*prompt(1, 4)) == 4


def test_later_look_up_asks_again(place):
    writer, reader = place.engine("a"), place.engine("b")
    turn(writer, *prompt(1, 5))
    keys, context = prompt(1, 6)
    assert [writer.status(key, context) for key in keys] == [2, 2, 2, 2, 2, 0]
    writer.prepare_store(keys[5:], context)
    other = prompt(1, 8)[1]
    assert [reader.status(key, other) for key in keys] == [2, 2, 2, 2, 2, 1]
    # Another request of the engine has brought the first block onto the device.
    assert [reader.status(key, other) for key in keys[1:]] == [2, 2, 2, 2, 1]
    writer.complete_store(keys[5:], context)
    writer.owner_figures()
    assert [reader.status(key, other) for key in keys[1:]] == [2, 2, 2, 2, 2]


def test_grown_prompt_finds_later_blocks(node):
    engine, (keys, context) = node(64).engine("a"), prompt(1, 8)
    positions = context.positions
    turn(engine, keys[4:], ReqContext(), use_positions=False)
    context.set_offload_key_positions(dict.fromkeys(keys[:4], 16))
    assert engine.status(keys[1], context) == 0
    context.set_offload_key_positions(positions)
    assert [engine.status(key, context) for key in keys[4:]] == [2] * 4


def test_several_groups_hold_all_ready_blocks(node):
    node = node(64)
    engine = node.engine("a", num_groups=2)
    keys = [key_of(1, place, group) for group in (0, 1) for place in range(8)]
    stored = keys[:6] + keys[13:]
    context = ReqContext()
    engine.complete_store(engine.prepare_store(stored, context).keys_to_store, context)
    engine.on_request_finished(context)
    context = ReqContext()
    context.set_offload_key_positions({key: 16 * (i % 8 + 1) for i, key in enumerate(keys)})
    assert [engine.status(key, context) for key in keys] == [2 if key in stored else 0 for key in keys]
    assert engine.parts()[1].stats.round_trips == 2
    # The leases end with the last load, whatever the request stores meanwhile.
    engine.prepare_load([keys[5]], context)
    engine.prepare_load([keys[13]], context)
    engine.complete_load([keys[5]], context)
    assert engine.prepare_store([keys[6]], context).keys_to_store == [keys[6]]
    assert node.leases.engines[engine.number].num_held == 9
    engine.complete_load([keys[13]], context)
    engine.owner_figures()
    assert node.leases.engines[engine.number].num_held == 0


def test_owner_executes_hints_of_sessions(node):
    node = node(16, {"cache_policy": "lru", "tiers": [{"type": "memory", "capacity": "64KiB"}]})
    engine = node.engine("a")
    turn(engine, *prompt(0, 2, kv_transfer_params={"kvcache": {"session_id": "s", "next_use": "soon"}}))
    wait_for(lambda: engine.owner_figures() and not node.leases.manager.has_pending_work())
    pool, (keys, _) = node.leases.manager.pool, prompt(0, 2)
    for document in (1, 2, 3):  # an engine has at most half of the slots at a time
        turn(engine, *prompt(document, 8))
        wait_for(lambda: engine.owner_figures() and not node.leases.manager.has_pending_work())
    assert pool.states(keys) == bytes(2)
    action = {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1.0", "payload": {"session_id": "s"}}
    message = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    assert node.leases.hints.ask(message) == ["accepted"]
    wait_for(lambda: pool.states(keys) == bytes([2, 2]))
    action["payload"] = {"block_hashes": [keys[0][:-4].hex()]}
    # Keys of a pool are more than hashes.
    assert node.leases.hints.ask(message) == ["rejected"]
    turn(engine, *prompt(4, 1, kv_hints=message))
    wait_for(lambda: engine.owner_figures() and len(node.leases.hints.parts()) == 2)
    (answers,) = (part.stats for part in node.leases.hints.parts() if part.labels == (("type", "kv.prefetch"),))
    assert (answers.accepted, answers.rejected) == (1, 2)


def test_hybrid_blocks_return_from_tier(node):
    """Blocks that lie in a tier only are found, the first one of the prompt, too."""
    node = node(16, {"cache_policy": "lru", "tiers": [{"type": "memory", "capacity": "64KiB"}]})
    engine, other = node.engine("a", num_groups=2), node.engine("b", num_groups=2)

    def ask(reader, document):
        keys = [key_of(document, place, group) for group in (0, 1) for place in range(2)]
        context = ReqContext()
        context.set_offload_key_positions({key: 16 * (i % 2 + 1) for i, key in enumerate(keys)})
        states = [reader.status(key, context) for key in keys]
        reader.on_schedule_end()
        return keys, context, states

    for document in range(8):
        keys, context, _ = ask(engine, document)
        engine.complete_store(engine.prepare_store(keys, context).keys_to_store, context)
        engine.on_request_finished(context, use_positions=True)
        engine.owner_figures()
        wait_for(lambda: not node.owner.pool.manager.has_pending_work())
    for document in (0, 1):
        keys, context, states = ask(other, document)
        assert states == [1] * 4
        wait_for(lambda context=context, keys=keys: [other.status(key, context) for key in keys] == [2] * 4)
        other.prepare_load(keys, context)
        other.complete_load(keys, context)
        other.on_request_finished(context)
    other.owner_figures()
    node.check()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("version", [None, 7])
def test_reset_leaves_blocks_of_others(place, version, restarts):
    engine, other = place.engine("a", weights="sha256:a"), place.engine("b", weights="sha256:a")
    named = place.engine("c", weights="version:7")
    turn(engine, *prompt(1, 4))
    held = prompt(1, 4)
    assert other.lookup(*held) == 4
    engine.reset_cache(version)
    if restarts:
        place.restart()
    assert other.prepare_load(*held).block_ids.tolist() == [0, 1, 2, 3]
    other.complete_load(*held)
    assert (turn(engine, *prompt(1, 5)), turn(other, *prompt(1, 4))) == (0, 4)
    turn(other, *prompt(2, 3))
    hits = [[reader.lookup(*prompt(document, 5)) for document in (1, 2)] for reader in (engine, other, named)]
    assert hits == [[5, 0], [4, 3], [5 if version else 0, 0]]
    other.reset_cache(version)
    assert [other.lookup(*prompt(document, 5)) for document in (1, 2)] == [5 if version else 0, 0]
    late = place.engine("d", weights="sha256:a")
    assert [late.lookup(*prompt(document, 5)) for document in (1, 2)] == [4, 3]
    place.check()


def test_reset_to_current_version_keeps_places(node):
    """A request that grows after the reset finds its own blocks, and none of its first ones under later keys."""
    engine = node().engine("a", weights="version:v1")
    turn(engine, *prompt(1, 3))
    keys, context = prompt(1, 3)
    assert [engine.status(key, context) for key in keys] == [2] * 3
    slots = engine.prepare_load(keys, context).block_ids.tolist()
    engine.complete_load(keys, context)
    engine.reset_cache("v1")
    longer, grown = prompt(1, 6)
    context.set_offload_key_positions(grown.positions)
    assert [engine.status(key, context) for key in longer] == [2, 2, 2, 0, 0, 0]
    assert engine.prepare_load(keys, context).block_ids.tolist() == slots


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("is_late", [False, True], ids=["answered", "late"])
def test_running_loads_of_half_end(node, version, is_late):
    """An engine whose running loads hold its whole share may begin the copy that returns them, after any reset."""
    place = node(16)
    engine = place.engine("a", weights="version:v1", patience_s=0.1 if is_late else 10.0)
    turn(engine, *prompt(1, 8))
    keys, context = prompt(1, 8)
    assert [engine.status(key, context) for key in keys] == [2] * 8
    engine.prepare_load(keys, context)
    if is_late:
        with gated(place.owner):
            engine.reset_cache(version)
        wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)
    else:
        engine.reset_cache(version)
    assert turn(engine, *prompt(2, 2)) == 0
    assert turn(engine, *prompt(2, 2)) == 2
    wait_for(lambda: place.leases.engines[engine.number].num_held == 0)
    place.check()


def test_store_overtaken_by_reset_is_dropped(place):
    engine, other = (place.engine(name, weights="sha256:a") for name in "ab")
    keys, context = prompt(1, 4)
    assert engine.prepare_store(keys, context).keys_to_store == keys
    engine.reset_cache()
    # The worker may still write to the slots, until the engine reports the end.
    assert engine.owner_figures()["num_free"] == 60
    engine.complete_store(keys, context)
    assert engine.owner_figures()["num_free"] == 64
    assert [reader.lookup(*prompt(1, 4)) for reader in (engine, other)] == [0, 0]
    place.check()


@pytest.mark.parametrize("ends", ["reset", "process"])
def test_left_epoch_is_evicted_first(node, ends):
    node = node(16)
    engine, other = node.engine("a", weights="sha256:a"), node.engine("b", weights="sha256:b")
    turn(other, *prompt(1, 4))
    engine.reset_cache()
    # The most recent blocks.
    for document in (2, 3):
        turn(engine, *prompt(document, 4))
    if ends == "reset":
        engine.reset_cache("v7")
    else:
        engine.owner_figures()
        node.leases.bury(engine.number)
    wait_for(lambda: not node.leases._left)
    for document in (4, 5, 6):
        turn(other, *prompt(document, 4))
    assert [turn(other, *prompt(document, 4)) for document in (1, 4, 5, 6)] == [4] * 4


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_each_store_is_one_message(node, policy):
    node = node(64, {"cache_policy": policy})
    engine, other = node.engine("a"), node.engine("b")
    stores = [prompt(document, 2) for document in range(5)]
    taken = [engine.prepare_store(*store).keys_to_store for store in [*stores, prompt(4, 2)]]
    assert taken == [*(keys for keys, _ in stores), []]
    assert engine.parts()[1].stats.round_trips == 6
    assert other.prepare_store(*prompt(3, 2)).keys_to_store == []
    for keys, context in stores:
        engine.complete_store(keys, context, success=keys != stores[4][0])
        engine.on_request_finished(context, use_positions=True)
    assert engine.owner_figures()["num_pending"] == 0
    assert [other.lookup(*prompt(document, 2)) for document in range(5)] == [2, 2, 2, 2, 0]
    node.check()


def test_idle_engine_keeps_no_message(engine, other):
    """The last store of an engine is found without a later step of it."""
    keys, context = prompt(1, 4)
    engine.prepare_store(keys, context)
    engine.on_request_finished(context, use_positions=True)
    engine.complete_store(keys, context)
    assert wait_for(lambda: other.lookup(*prompt(1, 4))) == 4


def test_slot_of_two_requests_counts_once(place, engine):
    turn(engine, *prompt(1, 20))
    held = [prompt(1, 20) for _ in range(2)]
    assert [engine.lookup(*item) for item in held] == [20, 20]
    assert place.leases.engines[engine.number].num_held == 20
    engine.on_request_finished(held[0][1])
    engine.prepare_store([key_of(2, 0)], held[1][1])  # the request computes, so it loads no more
    assert place.leases.engines[engine.number].num_held == 0


def test_running_load_hides_no_reset(place):
    engine, (keys, context) = place.engine("a"), prompt(1, 4)
    turn(engine, *prompt(1, 4))
    waiting = prompt(1, 4)
    assert engine.lookup(*waiting) == 4
    assert [engine.status(key, context) for key in keys] == [2] * 4
    engine.prepare_load(keys, context)
    engine.prepare_store(*prompt(2, 28))  # all of the engine's share is in copies
    engine.reset_cache()
    engine.complete_load(keys, context)
    assert [engine.status(key, context) for key in keys] == [0] * 4
    assert engine.lookup(*waiting) == 0
    # The end of the next copy returns the slots, and the blocks from before the reset stay.
    turn(engine, *prompt(3, 8))
    assert engine.owner_figures()["num_free"] == 64 - 8 - 4
    assert engine.owner_figures()["num_referenced"] == 0
    place.check()


def test_uses_stay_ordered_over_owners(node):
    node = node(16)
    engine = node.engine("a")
    for documents in ((1, 2), (1,), (3, 4, 5)):
        for document in documents:
            turn(engine, *prompt(document, 4))
        engine.owner_figures()
        node.restart()
    assert [engine.lookup(*prompt(document, 4)) for document in (1, 2)] == [4, 0]


def test_greeting_names_own_slots_only(place, engine, other, monkeypatch):
    turn(engine, *prompt(1, 4))
    held = prompt(1, 4)
    assert engine.lookup(*held) == 4
    slots = engine.prepare_load(*held).block_ids.tolist()
    monkeypatch.setattr(other, "_leases", lambda: [(1, slots, [])])
    other._link.lose(OSError("planted"))
    wait_for(lambda: other.on_schedule_end() or place.owner.stats["dropped_clients"])
    assert not other._link.is_ready
    place.check()


def test_older_greeting_replaces_no_leases(place):
    """The rest of a long greeting, in a connection that was given up, arrives behind the next greeting."""
    engine, held = place.engine("a"), prompt(1, 4)
    turn(engine, *prompt(1, 4))
    link = engine._link
    greeting = protocol.pack(protocol.HELLO, 0, 0, json.dumps({**link.hello, "leases": []}).encode())
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(str(place.folder / "socket"))
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(late, [greeting[:100]], [pidfd])
        os.close(pidfd)
        link.close()
        wait_for(lambda: engine.on_schedule_end() or link.is_ready)
        assert engine.lookup(*held) == 4
        with suppress(OSError):
            late.sendall(greeting[100:])
        assert late.recv(1) == b""
    assert engine.owner_figures()["num_referenced"] == 4
    place.check()


def test_largest_store_names_its_limit(node):
    engine = node(16).engine("a")
    keys, context = prompt(1, 16)
    assert engine.prepare_store(keys[: engine.num_blocks + 1], context) is None
    assert engine.prepare_store(keys[: engine.num_blocks], context).keys_to_store == keys[:8]
