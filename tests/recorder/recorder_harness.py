"""What the tests of recordings share: requests, all calls of a manager, and their replay."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvcache import CPUOffloadingManager, ReqContext, Retention
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording
from kvcache.recorder import ops
from kvcache.registry import POLICIES

COMPILED = [name for name in POLICIES.names() if ":" not in name]


def key(number: int) -> bytes:
    return b"block %d" % number + bytes(4)


def serve(manager, num_requests):
    for number in range(num_requests):
        request(manager, [key(number * 7 + i) for i in range(7)])


def request(manager, keys):
    """Make the four calls of a request whose blocks are not loaded."""
    context = ReqContext()
    manager.lookup(keys, context)
    output = manager.prepare_store(keys, context)
    if output is not None:
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)


def replayed(path):
    """Replay a recording to its end with the same answers, and return the outcome."""
    outcome = replay_recording(Recording(path))
    assert (outcome.difference, outcome.end) == (None, "")
    return outcome


def touches(path):
    """Return the hashed keys of each recorded touch."""
    return [call.keys for call in Recording(path) if call.op is ops.Op.TOUCH]


def make_all_calls(manager, rng, num_requests, clock=None, num_prompts=30):
    """Make all kinds of valid and invalid calls, as concurrent requests would."""
    open_requests = []
    for number in range(num_requests):
        if clock is not None:
            clock[0] += rng.random()
        retention = Retention(rng.choice(("soon", "later", "end"))) if rng.random() < 0.4 else None
        params = {"kvcache": rng.choice(({"priority": 1}, {"nonsense": 1}, 7))} if rng.random() < 0.1 else None
        context = rng.choice((ReqContext(str(number), params, retention), None))
        prompt = rng.randrange(num_prompts)
        keys = [key(100 * prompt + i) for i in range(rng.randrange(1, 14))]
        if context is not None and rng.random() < 0.3:
            for i, one in enumerate(keys):
                context.set_offload_key_position(one, 16 * (i + 1))
        num_hits = manager.lookup(keys, context) or 0
        manager.lookup(keys[0], context)
        manager.touch(tuple(keys) if rng.random() < 0.2 else keys, context)
        if clock is not None and rng.random() < 0.05:
            clock[0] -= 50
            with suppress(ValueError):  # some policies refuse it
                manager.touch(keys, context)
            clock[0] += 50
        manager.prepare_load(keys[:num_hits], context)
        open_requests.append((context, keys, num_hits))
        while len(open_requests) > 3 or (open_requests and number == num_requests - 1):
            context, keys, num_hits = open_requests.pop(rng.randrange(len(open_requests)))
            manager.complete_load(keys[:num_hits], context)
            output = manager.prepare_store(keys, context)
            if output is not None:
                stored = output.keys_to_store
                manager.complete_store(stored, context, rng.random() < 0.9) if rng.random() < 0.9 else (
                    manager.complete_store(stored, True)
                )
            for bad in ([b""], [1], [b"unknown"]):
                with pytest.raises((ValueError, KeyError)):
                    manager.complete_load(bad, context)
            if isinstance(manager, CPUOffloadingManager):
                with pytest.raises(ValueError, match="req_context"):
                    manager.touch(keys, "no request")
            if context is not None:
                if rng.random() < 0.5 and hasattr(manager, "reorder"):
                    manager.reorder(context)
                manager.on_request_finished(context, use_positions=rng.random() < 0.5)
                if hasattr(manager, "hint") and rng.random() < 0.2:
                    manager.hint(context, "soon")
        if rng.random() < 0.2:
            manager.hint(rng.choice((keys, context or keys)), rng.choice(("soon", "later", "end")))
            with pytest.raises(ValueError, match="next_use"):
                manager.hint(keys, "perhaps")
        manager.prefetch(keys)
        if rng.random() < 0.2:
            manager.demote(keys, context)
        list(manager.take_events(rng.choice((None, 2))))
        manager.on_schedule_end()
        if rng.random() < 0.005:
            for context, keys, num_hits in open_requests:
                manager.complete_load(keys[:num_hits], context)
            open_requests.clear()
            manager.reset_cache()
