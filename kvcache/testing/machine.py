"""A Hypothesis state machine that compares four managers after every step, for any policy.

The managers are: the manager's specification over the reference policy; the reference policy under the default cache;
the manager that users get; and a manager that drives the policy's five primitives over a backend. If two of them
differ, one has a bug.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.block import BlockStateError
from kvcache.control.backend import CPUBackend
from kvcache.control.cpu import BackendOffloadingManager, CPUOffloadingManager
from kvcache.control.manager import OffloadingManager
from kvcache.policies.base import CachePolicy
from kvcache.request import NEXT_USES, ReqContext, Retention
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.testing.reference import REFERENCE_POLICIES
from kvcache.testing.reference_manager import ReferenceManager

Policy: TypeAlias = str | type[CachePolicy]

_LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 200)
KEYS = tuple(bytes([i + 1]) + bytes(range(length - 1)) for i, length in enumerate(_LENGTHS))

_NEVER_STORED = b"never stored"
_NUM_CONTEXTS = 3
_BAD_KEYS = (b"", "text", None, 7, bytearray(b"bytearray"), ("tuple",))
_CONTAINERS: tuple[Callable[[list[bytes]], Iterable[bytes]], ...] = (list, list, tuple, iter, dict.fromkeys)
_ERRORS = (ValueError, KeyError, BlockStateError)

_one_key = st.sampled_from(KEYS)
_starts = st.sampled_from((0, 3, 6, 10, 15))
_prefixes = st.builds(lambda start, length: list(KEYS[start : start + length]), _starts, st.integers(1, 6))
_key_lists = st.one_of(_prefixes, st.lists(_one_key, max_size=6))
# The type in which keys are passed, and whether the keys are new objects.
_forms = st.tuples(st.sampled_from(_CONTAINERS), st.sampled_from((False, False, True)))
_context_slots = st.integers(0, _NUM_CONTEXTS)
# Keys, request, form, whether the first store fails, whether the request ends.
_requests = st.tuples(_prefixes, _context_slots, _forms, st.booleans(), st.booleans())


class CacheMachine(RuleBasedStateMachine):
    """Random requests against one policy, under every manager.

    Attributes
    ----------
    policy : str or type
        The policy under test: a registered name or a class.
    reference : type, optional
        Its plain-Python twin. The default is that of its name in `REFERENCE_POLICIES`. Without one, the policy itself
        is used, so that the managers are still compared with each other.
    max_capacity : int
        Limit of the cache size, in blocks.
    manager_options : dict
        Additional arguments of every manager.
    """

    policy: ClassVar[Policy] = "lru"
    reference: ClassVar[type[CachePolicy] | None] = None
    max_capacity: ClassVar[int] = 8
    manager_options: ClassVar[dict[str, Any]] = {}

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.open_managers(data.draw(st.integers(1, self.max_capacity), label="capacity"))

    def open_managers(self, capacity: int) -> None:
        """Open all managers, each with a cache of `capacity` blocks."""
        twin = self.reference
        if twin is None:
            twin = REFERENCE_POLICIES.get(self.policy) if isinstance(self.policy, str) else self.policy
        if twin is None:
            raise ValueError(f"policy {self.policy!r} has no reference; name its class, or set `reference`")
        options = {"enable_events": True, **self.manager_options}
        self.now_s = 0.0
        timed = {**options, "clock": lambda: self.now_s} if twin.reads_clock else options
        self.specified = ReferenceManager(16, capacity, twin, **timed)
        self.managers: dict[str, OffloadingManager] = {
            "specification": self.specified,
            "default cache over the reference": CPUOffloadingManager(16, capacity, twin, **timed),
            "CPU manager": CPUOffloadingManager(16, capacity, self.policy, **timed),
        }
        if not twin.declines:
            # With only the five primitives, a policy cannot decline keys.
            self.managers["backend manager"] = BackendOffloadingManager(
                CPUBackend(16, capacity), self.policy, **options
            )
        if twin.stores_all:
            for manager in self.managers.values():
                _policy(manager).stores_all = True
        self.contexts = [ReqContext(str(slot)) for slot in range(_NUM_CONTEXTS)]

    @rule(key=_one_key, slot=_context_slots, fresh=st.booleans())
    def look_one_up(self, key: bytes, slot: int, fresh: bool) -> None:
        self._all(lambda manager: manager.lookup(_copied(key) if fresh else key, self._context(slot)))

    @rule(keys=_prefixes, slot=_context_slots, kind=st.sampled_from((list, tuple)), form=_forms)
    def look_run_up(self, keys: list[bytes], slot: int, kind: type, form: Any) -> None:
        self._all(lambda manager: manager.lookup(kind(_renewed(keys, form[1])), self._context(slot)))

    @rule(keys=_key_lists, slot=_context_slots, form=_forms)
    def touch(self, keys: list[bytes], slot: int, form: Any) -> None:
        self._call("touch", keys, slot, form)

    @rule(data=st.data(), slot=_context_slots, form=_forms, stays=st.booleans())
    def load(self, data: st.DataObject, slot: int, form: Any, stays: bool) -> None:
        keys = self._drawn(data, lambda ref_cnt: ref_cnt >= 0)
        if self._call("prepare_load", keys, slot, form) is not None and not stays:
            self._call("complete_load", keys, slot, form)

    @rule(data=st.data(), slot=_context_slots, form=_forms)
    def complete_load(self, data: st.DataObject, slot: int, form: Any) -> None:
        self._call("complete_load", self._drawn(data, lambda ref_cnt: ref_cnt > 0), slot, form)

    @rule(keys=_key_lists, slot=_context_slots, form=_forms, end=st.sampled_from(("success", "failure", "later")))
    def store(self, keys: list[bytes], slot: int, form: Any, end: str) -> None:
        output = self._call("prepare_store", keys, slot, form)
        if output is not None and end != "later":
            self._call("complete_store", output.keys_to_store, slot, form, end == "success")

    @rule(data=st.data(), slot=_context_slots, form=_forms, success=st.booleans())
    def complete_store(self, data: st.DataObject, slot: int, form: Any, success: bool) -> None:
        keys = self._drawn(data, lambda ref_cnt: ref_cnt < 0)
        if slot:
            self._call("complete_store", keys, slot, form, success)
        else:  # the older signature
            self._all(lambda manager: manager.complete_store(list(keys), success))

    @rule(requests=st.lists(_requests, min_size=1, max_size=6))
    def serve(self, requests: list[tuple[list[bytes], int, Any, bool, bool]]) -> None:
        for keys, slot, form, retries, ends in requests:
            num_ready = self._all(lambda manager: manager.lookup(_renewed(keys, form[1]), self._context(slot)))  # noqa: B023
            self._call("touch", keys, slot, form)
            self._call("prepare_load", keys[:num_ready], slot, form)
            self._call("complete_load", keys[:num_ready], slot, form)
            if retries:
                self.store(keys, slot, form, "later")
                self._call("touch", keys, slot, form)
                self._call("complete_store", keys, slot, form, False)
            self.store(keys, slot, form, "success")
            if ends:
                self.finish(slot)
            self.nothing_tells_them_apart()

    @rule(data=st.data())
    def end_all_jobs(self, data: st.DataObject) -> None:
        blocks = self.specified.blocks
        written = [key for key in blocks if blocks[key].ref_cnt < 0]
        loaded = [key for key in blocks for _ in range(blocks[key].ref_cnt)]
        self._call("complete_load", data.draw(st.permutations(loaded), label="loaded"), 0, (list, True))
        self._call("complete_store", written, 0, (list, True))

    @rule(num_requests=st.sampled_from((1, 63, 250, 501)))
    def let_time_pass(self, num_requests: int) -> None:
        # For policies that age blocks by the number of requests.
        for manager in self.managers.values():
            for _ in range(num_requests):
                manager.touch([_NEVER_STORED])

    @rule(num_keys=st.sampled_from((3, 40, 300)), num_between=st.integers(0, 2))
    def churn(self, num_keys: int, num_between: int) -> None:
        # Keys that are stored, used again after a while, and evicted: ghosts, histories and histograms need them.
        for manager in self.managers.values():
            for i in range(num_keys):
                key = b"churn %d" % i
                manager.prepare_store([key])
                manager.complete_store([key])
                for _ in range(num_between):
                    manager.touch([_NEVER_STORED])
                manager.touch([key])

    @rule(seconds=st.sampled_from((0.5, 2.048, 5.0, 60.0, 3600.0, 1e6)))
    def wait(self, seconds: float) -> None:
        # For policies that read the clock.
        self.now_s += seconds

    @rule(slot=_context_slots)
    def finish(self, slot: int) -> None:
        context = self._context(slot)
        if context is not None:
            self._all(lambda manager: manager.on_request_finished(context))

    @rule(slot=st.integers(1, _NUM_CONTEXTS))
    def announce(self, slot: int) -> None:
        self._all(lambda manager: manager.on_new_request(self.contexts[slot - 1]))

    @rule(slot=st.integers(1, _NUM_CONTEXTS), next_use=st.sampled_from((None, *NEXT_USES)))
    def forget_context(self, slot: int, next_use: str | None) -> None:
        self.contexts[slot - 1] = ReqContext(str(slot), retention=Retention(next_use))

    @rule(keys=_key_lists, slot=_context_slots, form=_forms, next_use=st.sampled_from(NEXT_USES))
    def hint(self, keys: list[bytes], slot: int, form: Any, next_use: str) -> None:
        container, is_copied = form
        context = self._context(slot)
        self._all(lambda manager: manager.hint(context or container(_renewed(keys, is_copied)), next_use))

    @rule(num_keys=st.integers(1, 8))
    def crowd_out(self, num_keys: int) -> None:
        # Evict every block that may be evicted, to compare the whole order of eviction.
        for i in range(num_keys):
            for method in ("prepare_store", "complete_store"):
                self._call(method, [b"crowd %d" % i], 0, (list, False))

    @rule(slot=st.integers(1, _NUM_CONTEXTS), positions=st.dictionaries(_one_key, st.integers(0, 9), max_size=6))
    def set_positions(self, slot: int, positions: dict[bytes, int]) -> None:
        for key, position in positions.items():
            self.contexts[slot - 1].set_offload_key_position(_copied(key), position)

    @rule()
    def reset(self) -> None:
        self._all(lambda manager: manager.reset_cache())

    @rule(
        method=st.sampled_from(("lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store")),
        keys=_key_lists,
        bad=st.sampled_from(_BAD_KEYS),
        slot=_context_slots,
        data=st.data(),
    )
    def name_no_keys(self, method: str, keys: list[Any], bad: object, slot: int, data: st.DataObject) -> None:
        # A look-up ends at the first miss, so only an invalid first key is certain to be detected.
        at = 0 if method == "lookup" else data.draw(st.integers(0, len(keys)), label="at")
        spoiled = [*keys[:at], bad, *keys[at:]]
        self._all(lambda manager: getattr(manager, method)(list(spoiled), self._context(slot)), ValueError)
        if method != "lookup" and not isinstance(bad, tuple | bytearray):
            self._all(lambda manager: getattr(manager, method)(bad, self._context(slot)), ValueError)

    @rule(size=st.floats(0, 8))
    def set_target(self, size: float) -> None:
        if hasattr(self.specified.policy, "target_t1_size"):
            for manager in self.managers.values():
                _policy(manager).target_t1_size = size

    @invariant()
    def nothing_tells_them_apart(self) -> None:
        if not hasattr(self, "managers"):
            return
        policies = {name: _policy(manager) for name, manager in self.managers.items()}
        shown = {name for name in _SHOWN if all(hasattr(policy, name) for policy in policies.values())}
        seen = {
            name: {
                "events": list(manager.take_events()),
                "stats": manager.stats(),
                "blocks": _blocks(policies[name]),
                **{attribute: _SHOWN[attribute](getattr(policies[name], attribute)) for attribute in shown},
            }
            for name, manager in self.managers.items()
        }
        for name, policy in policies.items():
            assert seen[name] == seen["specification"], _parted(name, seen)
            check = getattr(policy, "check", None)
            if check is not None:
                check()

    def _context(self, slot: int) -> ReqContext | None:
        return self.contexts[slot - 1] if slot else None

    def _drawn(self, data: st.DataObject, wanted: Callable[[int], bool]) -> list[bytes]:
        """Draw keys: mostly keys whose blocks are in a certain state, sometimes any keys."""
        blocks = self.specified.blocks
        fitting = [key for key in KEYS if key in blocks and wanted(blocks[key].ref_cnt)]
        choices = [_key_lists]
        if fitting:
            some = st.lists(st.sampled_from(fitting), min_size=1, max_size=2 * len(fitting))
            choices = [st.just(fitting), some, some, _key_lists]
        return data.draw(st.one_of(choices), label="keys")

    def _call(self, method: str, keys: list[bytes], slot: int, form: Any, *arguments: object) -> Any:
        container, is_copied = form
        context = self._context(slot)
        return self._all(
            lambda manager: getattr(manager, method)(container(_renewed(keys, is_copied)), context, *arguments)
        )

    def _all(self, call: Callable[[Any], Any], error: type[Exception] | None = None) -> Any:
        """Make the same call to every manager. All must return the specification's result, or raise its error type."""
        answers: dict[str, Any] = {}
        outcomes = {}
        for name, manager in self.managers.items():
            try:
                answers[name] = call(manager)
                outcomes[name] = _comparable(answers[name])
            except _ERRORS as raised:
                outcomes[name] = type(raised)
        for name, outcome in outcomes.items():
            assert outcome == outcomes["specification"], _parted(name, outcomes)
            assert error is None or outcome is error, f"{name} should raise {error}: {outcome}"
        return answers.get("specification")


def cache_machine(policy: Policy, reference: type[CachePolicy] | None = None, **attributes: Any) -> type[CacheMachine]:
    """Return a state machine for `policy`; its `TestCase` runs under pytest and unittest.

    Parameters
    ----------
    policy : str or type
        The policy under test: a registered name or a class.
    reference : type, optional
        Its plain-Python twin.
    **attributes
        Other attributes of `CacheMachine`.

    Returns
    -------
    type
        A `hypothesis.stateful.RuleBasedStateMachine`.

    Examples
    --------
    >>> TestMine = cache_machine("lru").TestCase
    """
    name = policy if isinstance(policy, str) else policy.__name__
    return type(f"CacheMachine[{name}]", (CacheMachine,), {"policy": policy, "reference": reference, **attributes})


def serve_fixed_requests(machine: CacheMachine, num_requests: int = 150) -> None:
    """Serve the same requests in every run, and compare the managers after each.

    So a fault that many requests show is found whatever examples are drawn, and however few.
    """
    draw = random.Random(0)
    machine.open_managers(machine.max_capacity)
    for _ in range(num_requests):
        start = draw.choice((0, 3, 6, 10))
        keys = list(KEYS[start : start + draw.randint(1, 6)])
        machine.serve([(keys, draw.randint(0, _NUM_CONTEXTS), (list, False), draw.random() < 0.2, draw.random() < 0.5)])


def _copied(key: bytes) -> bytes:
    return bytes(bytearray(key))


def _renewed(keys: list[bytes], fresh: bool) -> list[bytes]:
    return [_copied(key) for key in keys] if fresh else list(keys)


def _policy(manager: OffloadingManager) -> Any:
    return manager.policy  # type: ignore[attr-defined]


def _comparable(answer: Any) -> Any:
    if isinstance(answer, PrepareStoreOutput):
        return answer.keys_to_store, _comparable(answer.store_spec), answer.evicted_keys
    if isinstance(answer, LoadStoreSpec):
        return type(answer), answer.block_ids.dtype.str, answer.block_ids.tolist()  # type: ignore[attr-defined]
    return type(answer), answer


def _blocks(policy: CachePolicy) -> dict[bytes, tuple[int, int]]:
    blocks = {key: policy.get(_copied(key)) for key in KEYS}
    return {key: (block.block_id, block.ref_cnt) for key, block in blocks.items() if block is not None}


def _list(resident: Any) -> Any:
    return list(resident), len(resident), [key for key in KEYS if key in resident]


def _ghosts(ghosts: Any) -> Any:
    return len(ghosts), [key for key in KEYS if key in ghosts]


# State that a policy may expose, and how to compare it. Only state that both sides have is compared.
_SHOWN: dict[str, Callable[[Any], Any]] = {
    "t1": _list,
    "t2": _list,
    "queues": lambda queues: [_list(queue) for queue in queues],
    "b1": _ghosts,
    "b2": _ghosts,
    "history": _ghosts,
    "target_t1_size": float,
    "clock": int,
    "life": int,
    "touches": int,
    "num_remembered": int,
    "worths": list,
}


def _parted(name: str, seen: dict[str, Any]) -> str:
    return f"the {name} differs from the specification:\n  {seen[name]!r}\n  {seen['specification']!r}"
