"""The parser of hints: what clients and routers may send, and that nothing else harms or costs anything."""

from __future__ import annotations

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import CPUOffloadingManager, ManagerStats, ReqContext
from kvcache.hints import ACTION_VERSION, KINDS, MAX_ACTIONS, HintAction, actions_of, own_use, parse_hints


def envelope(*actions: tuple[str, dict[str, Any]], version: str = ACTION_VERSION) -> dict[str, Any]:
    named = [
        {"action_id": str(place), "action_type": kind, "action_version": version, "payload": payload}
        for place, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": named}


def as_objects(message: Any) -> Any:
    """Return an envelope as engines pass it on: objects with attributes, and payloads in dicts."""
    actions = [SimpleNamespace(**action) for action in message["actions"]]
    return SimpleNamespace(**{**message, "actions": actions})


@pytest.mark.parametrize("form", [dict, as_objects])
@pytest.mark.parametrize(
    ("kind", "payload", "action"),
    [
        ("kv.next_use", {"next_use": "end"}, HintAction("kv.next_use", "end")),
        ("kv.next_use", {"next_use": 60}, HintAction("kv.next_use", "soon")),
        ("kv.next_use", {"next_use": 60.5, "session_id": "s"}, HintAction("kv.next_use", "later", "s")),
        ("kv.retain", {"ttl_s": 5}, HintAction("kv.retain", "soon")),
        ("kv.prefetch", {"session_id": "s"}, HintAction("kv.prefetch", None, "s")),
        ("kv.demote", {"block_hashes": ["0a"]}, HintAction("kv.demote", hashes=["0a"])),
        ("kv.end_session", {"session_id": "s"}, HintAction("kv.end_session", "end", "s")),
    ],
)
def test_action_is_read(form: Any, kind: str, payload: dict[str, Any], action: HintAction) -> None:
    assert parse_hints(form(envelope((kind, payload)))) == [action]


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (("kv.fetch", {}), "'kv.fetch'"),
        (("kv.next_use", {"next_use": True}), "True"),
        (("kv.next_use", {"next_use": -1}), "-1"),
        (("kv.next_use", {"next_use": float("nan")}), "nan"),
        (("kv.retain", {}), "None"),
        (("kv.retain", {"ttl_s": "soon"}), "'soon'"),
        (("kv.prefetch", {"session_id": "x" * 129}), "of length 129"),
        (("kv.demote", {"block_hashes": ["0a"] * 513}), "a list"),
    ],
)
def test_invalid_action_is_ignored_alone(action: Any, named: str) -> None:
    bad, good = parse_hints(envelope(action, ("kv.next_use", {"next_use": "soon"})))
    assert bad.answer == "ignored"
    assert named in bad.reason
    assert own_use([bad, good]) == "soon"


def test_unknown_versions_are_ignored() -> None:
    assert parse_hints(envelope(("kv.prefetch", {}), version="2.0"))[0].answer == "ignored"
    with pytest.raises(ValueError, match="protocol_version is unknown: got '9'"):
        parse_hints({"protocol_version": "9", "actions": []})
    assert actions_of(ReqContext(kv_hints={"actions": 3}))[0].answer == "ignored"


def test_further_actions_are_ignored_together() -> None:
    found = parse_hints(envelope(*[("kv.prefetch", {})] * 100_000))
    assert [action.answer for action in found] == [""] * MAX_ACTIONS + ["ignored"]


def test_priority_of_retain_is_ignored() -> None:
    manager = CPUOffloadingManager(16, 8)
    hints = envelope(("kv.retain", {"ttl_s": 5, "priority": 9}))
    manager.touch([b"a"], ReqContext(kv_hints=hints))
    assert manager.stats().ignored_hints == 1
    assert own_use(parse_hints(hints)) == "soon"


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = {"actions": [value]}
    return value


HUGE = ["x" * 10_000_000, b"x" * 1_000_000, ["x"] * 100_000, 1 << 8_000_000, nested(5_000)]
huge = st.integers(0, len(HUGE) - 1).map(lambda place: HUGE[place])
names = st.sampled_from(["action_type", "action_version", "payload", "next_use", "ttl_s", "session_id", "block_hashes"])
words = st.sampled_from([*KINDS, ACTION_VERSION, "0.1", "soon", "end"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | words | huge,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(names | st.integers(), inner, max_size=7),
    max_leaves=20,
)
actions = st.fixed_dictionaries({"action_type": words, "action_version": words, "payload": values}) | values
messages = values | st.builds(lambda found: {"protocol_version": "0.1", "actions": found}, st.lists(actions) | values)


@given(messages, values)
def test_any_message_costs_little(hints: Any, params: Any) -> None:
    context = ReqContext(kv_hints=hints, kv_transfer_params={"kvcache": params})
    tracemalloc.start()
    try:
        found = actions_of(context)
        assert tracemalloc.get_traced_memory()[1] < 50_000, "a value was copied or formatted"
    finally:
        tracemalloc.stop()
    assert len(found) <= 2 * (MAX_ACTIONS + 1)
    assert all(action.answer in ("", "ignored") and len(action.reason) < 400 for action in found)
    assert own_use(found) in (None, "end", "soon", "later")


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_envelope_equals_own_field(policy: str) -> None:
    def served(make: Any) -> tuple[ManagerStats, list[bytes]]:
        rng, manager = random.Random(1), CPUOffloadingManager(16, 40, policy, clock=lambda: 0.0)
        for turn in range(400):
            session = rng.randrange(12)
            keys = [bytes([session, place]) for place in range(rng.randrange(1, 8))]
            context = make(rng.choice(["end", "soon", "later", 5, 500]))
            found = manager.lookup(keys, context)
            manager.prepare_load(keys[:found], context)
            manager.complete_load(keys[:found], context)
            if (output := manager.prepare_store(keys, context)) is not None:
                manager.complete_store(output.keys_to_store, context, success=turn % 9 > 0)
            manager.on_request_finished(context)
        return manager.stats(), [key for key in map(bytes, ([i, j] for i in range(12) for j in range(8)))
                                 if manager.policy.get(key) is not None]  # fmt: skip

    own = served(lambda use: ReqContext(kv_transfer_params={"kvcache": {"next_use": use}}))
    assert own == served(lambda use: ReqContext(kv_hints=envelope(("kv.next_use", {"next_use": use}))))
    assert own == served(lambda use: ReqContext(kv_hints=as_objects(envelope(("kv.next_use", {"next_use": use})))))
    assert own != served(lambda use: ReqContext())
