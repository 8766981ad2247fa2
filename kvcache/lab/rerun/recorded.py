"""Replay a recording: make the same calls with the same clock and answers of tiers, and compare the answers.

Keys in a recording are hashes. No policy depends on the bytes of a key, so the answers are the same integers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.block import BlockStateError
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.traces.recording import Answer, Call, Recording, RecordingError, Result
from kvcache.metrics import MANAGER_METRICS
from kvcache.recorder.format import Events, Keys, Raised, Stored, block_ids_of
from kvcache.recorder.ops import BAD_CONTEXT, FIRST_CONTEXT, ONE_KEY, Op
from kvcache.registry import REMOVED
from kvcache.request import ReqContext, Retention
from kvcache.specs import PrepareStoreOutput
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import Tier, TierResult, TierStats
from kvcache.transfer.free_memory import memory_left

NOTES = frozenset({Op.CONTEXT, Op.POSITIONS, Op.GROUPS})
"""Records that prepare calls to come."""
_LISTS = frozenset({Op.LOOKUP, Op.TOUCH, Op.PREPARE_LOAD, Op.COMPLETE_LOAD, Op.PREPARE_STORE, Op.COMPLETE_STORE})
"""Calls with a list of keys."""
_EXPECTED_ERRORS = (ValueError, KeyError, BlockStateError, NotImplementedError)
_COMPARED_UNITS = frozenset({"blocks", "calls", "requests"})
_MAX_ENDED = 100_000
_BLOCK_BYTES = 256  # memory of a manager per block, an upper bound


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call of a replay whose answer differs; `reason` describes the fault if it equals the recorded one."""

    call: Call
    expected: Answer
    got: Answer
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of a replay: counts, the first `difference`, and why it ended early (`end`; empty if it did not).

    `num_skipped` calls were not replayed, because the recording does not hold the manager's state before them.
    `removed` are the names of options and hints of the recording that this version no longer has: they were left out.
    """

    num_calls: int
    num_skipped: int
    num_lost: int
    difference: Difference | None
    end: str
    removed: tuple[str, ...] = ()


class ScriptedTier(Tier):
    """A tier that returns prepared answers.

    Of `lookups`, a negative one is invalid; of `submits`, None refuses the job, and others are its recorded id; of
    `reports`, None is invalid. `raising` names the next methods that raise.
    """

    def __init__(self, medium: str) -> None:
        self.medium = medium
        self._job_ids: dict[int, int] = {}
        self.expect()

    def expect(self, *, lookups: Any = (), submits: Any = (), reports: Any = (), raising: Any = ()) -> None:
        """Replace the answers for the next calls."""
        self.lookups: deque[int | None] = deque(lookups)
        self.submits: deque[int | None] = deque(submits)
        self.reports: deque[list[Result | None]] = deque(reports)
        self.raising: deque[str] = deque(raising)

    def _raise(self, name: str) -> None:
        if self.raising and self.raising[0] == name:
            self.raising.popleft()
            raise RuntimeError(f"recorded: {name} raised")

    def lookup(self, keys: list[bytes]) -> int | None:
        self._raise("lookup")
        answer = self.lookups.popleft() if self.lookups else 0
        return None if answer is None else min(answer, len(keys))

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return self._submit("submit_store", job_id)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return self._submit("submit_load", job_id)

    def _submit(self, name: str, job_id: int) -> bool:
        self._raise(name)
        recorded_id = self.submits.popleft() if self.submits else None
        if recorded_id is not None:
            self._job_ids[recorded_id] = job_id
        return recorded_id is not None

    def get_finished(self) -> Any:
        self._raise("get_finished")
        results: list[Any] = []
        reported: Any = self.reports.popleft() if self.reports else ()
        for one in reported:
            if one is None:
                results.append(None)
                continue
            job_id = None if one.job_id is None else self._job_ids.pop(one.job_id, -1)
            results.append(TierResult(job_id, one.done, one.failed, one.removed, one.error, one.start_s, one.end_s))
        return results

    def cancel(self, job_id: int) -> None:
        self._raise("cancel")

    def reset(self, version: str | int | None = None) -> None:
        self._raise("reset")

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self._raise("touch")

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._raise("on_request_finished")

    def stats(self) -> TierStats:
        return TierStats(self.medium, 0, 0)

    def shutdown(self) -> None:
        return None


def make_manager(
    config: dict[str, Any], tiers: list[ScriptedTier], clock: Callable[[], float], policy: str | type | None = None
) -> CPUOffloadingManager | TieredOffloadingManager:
    """Create the manager that a recording's header describes, with `policy` instead of its own if that is given.

    `tiers` receives the manager's tiers. RecordingError if the configuration is invalid, or names a policy that is not
    registered: code that a file names runs only on request.
    """
    options = {name: value for name, value in config.items() if name not in REMOVED}
    given = options.pop("cache_policy", "lru")
    if not isinstance(given, str):
        raise RecordingError(f"the recording's policy must be a name, got {given!r}")
    if policy is None and ":" in given:
        raise RecordingError(f"the recording's policy is {given!r}, which is not registered: name it with --policy")
    try:
        num_blocks, block_size = options.pop("num_blocks"), options.pop("block_size")
        # A file may ask for any size: refuse it before memory is allocated.
        left = memory_left()
        if left is not None and type(num_blocks) is int and num_blocks * _BLOCK_BYTES > left[0]:
            raise RecordingError(f"a manager of {num_blocks} blocks does not fit this machine's memory")
        described = options.pop("tiers", None)
        deadline_s = options.pop("deadline_s", 5.0)
        chosen = given if policy is None else policy
        if described is None:
            return CPUOffloadingManager(block_size, num_blocks, chosen, clock=clock, **options)
        pairs = []
        for one in described:
            own = dict(one)
            # A scripted tier selects no victims.
            own.pop("cache_policy", None)
            tier = ScriptedTier(str(own.pop("medium", "TIER")))
            tiers.append(tier)
            pairs.append((tier, TierConfig(**own)))
        return TieredOffloadingManager(
            block_size, num_blocks, pairs, chosen, clock=clock, deadline_s=deadline_s, **options
        )
    except RecordingError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise RecordingError(f"the recording's configuration makes no sense: {error}") from error


class Runner:
    """Makes recorded calls on a manager of this `config`; see `make_manager`.

    `groups` maps each key to its KV-cache group, if an arbiter needed it.
    """

    def __init__(self, config: dict[str, Any], policy: str | type | None = None) -> None:
        self._times_s: deque[float] = deque()
        self._now_s = 0.0
        self.tiers: list[ScriptedTier] = []
        self.manager = make_manager(config, self.tiers, self._clock, policy)
        self._contexts: dict[int, ReqContext] = {}
        self._about: dict[int, dict[str, Any]] = {}
        # Hints may name a request that has ended.
        self._ended: OrderedDict[int, None] = OrderedDict()
        self.last_output: Any = None
        """The result of the last call, if it was a `prepare_store`."""
        self.groups: dict[bytes, bytes] = {}
        self._positioned: list[bytes] = []
        self.removed = set(config.keys() & REMOVED.keys())
        if isinstance(self.manager, TieredOffloadingManager) and self.manager.arbiter is not None:
            self.manager.arbiter.group_of = self.groups.get

    def note(self, record: Call) -> None:
        """Apply a record that prepares later calls, such as a request's hints."""
        if record.op is Op.CONTEXT:
            about = record.flag if isinstance(record.flag, dict) else {}
            self._about[record.context] = {name: self._without_removed(hint) for name, hint in about.items()}
            return
        if record.op is Op.GROUPS:
            self.groups.update(zip(self._positioned, record.keys, strict=False))
            return
        self._positioned = [key for key, _ in record.keys]
        context = self._context(record.context)
        if isinstance(context, ReqContext):
            if context.positions is None or not record.flag:
                context.set_offload_key_positions({})
            for key, end_token in record.keys:
                context.set_offload_key_position(key, end_token)

    def _without_removed(self, hint: Any) -> Any:
        """Return a recorded hint as this version reads it. Hints of older versions also have a priority and a TTL."""
        if not isinstance(hint, dict) or hint.get("priority") is None:
            return hint
        self.removed |= {name for name in ("priority", "ttl_s") if hint.get(name)}
        return {"next_use": hint.get("next_use")}

    def run(self, call: Call) -> Answer:
        """Make one call and return its answer in the format of recordings."""
        self._prepare(call)
        context = self._context(call.context)
        name = "lookup" if call.op is Op.LOOKUP_ONE else call.op.name.lower()
        self.last_output = None
        try:
            arguments, options = _arguments(call, context)
            answer = getattr(self.manager, name)(*arguments, **options)
            if call.op is Op.TAKE_EVENTS:
                return Events([(Keys(event.keys), bool(event.removed)) for event in answer])
        except RecordingError:
            raise
        except Exception as error:
            return Raised(type(error).__name__)
        if call.op is Op.PREPARE_STORE:
            self.last_output = answer
        elif call.op is Op.ON_REQUEST_FINISHED:
            self._ended[call.context] = None
            if len(self._ended) > _MAX_ENDED:
                self._contexts.pop(self._ended.popitem(last=False)[0], None)
        return _answer(answer)

    def stats(self) -> dict[str, int]:
        """Return the manager's counters and gauges that recordings hold."""
        stats = asdict(self.manager.stats())
        return {one.name: stats[one.name] for one in MANAGER_METRICS if one.unit in _COMPARED_UNITS}

    def _prepare(self, call: Call) -> None:
        self._times_s.clear()
        self._times_s.extend(float(one.value) for one in call.inputs if one.op is Op.CLOCK)  # type: ignore[arg-type]
        for number, tier in enumerate(self.tiers):
            tier.expect(**answers_of(call, number))

    def _clock(self) -> float:
        """Return the next recorded time, or the last one again if none is left."""
        if self._times_s:
            self._now_s = self._times_s.popleft()
        return self._now_s

    def _context(self, number: int) -> Any:
        if number < FIRST_CONTEXT:
            return object() if number == BAD_CONTEXT else None
        context = self._contexts.get(number)
        if context is None:
            about = self._about.get(number, {})
            context = self._contexts[number] = context_of(about, str(number))
            if about.get("predates_reset"):
                # The reset gave the request another number.
                context.request_keys[self.manager.pool.ages] = -1
        return context


def _arguments(call: Call, context: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the manager's method that a call names."""
    keys = list(call.keys) if isinstance(call.keys, list) else call.keys
    match call.op:
        case Op.STATUS if context is None:
            return [keys], {}
        case Op.COMPLETE_STORE:
            return [keys, context, not call.flag], {}
        case Op.REORDER:
            return [context], {}
        case Op.ON_REQUEST_FINISHED:
            return [context], {"use_positions": bool(call.flag)}
        case Op.HINT:
            return [keys if context is None else context, call.flag], {}
        case Op.PREFETCH:
            return [keys], {}
        case Op.REPORT_PREFILLS:
            return [], call.flag
        case Op.TAKE_EVENTS:
            return [call.flag - 1] if call.flag else [], {}
        case Op.ON_SCHEDULE_END | Op.RESET_CACHE:
            return [], {}
        case op if op in ONE_KEY | _LISTS | {Op.DEMOTE}:
            return [keys, context], {}
    raise RecordingError(f"record {call.number} is a call that this kvcache cannot make: {call.op}")


def context_of(about: dict[str, Any], req_id: str = "") -> ReqContext:
    """Return a request with the recorded hints."""
    retention = None
    hint = about.get("retention")
    if isinstance(hint, dict):
        try:
            retention = Retention(hint.get("next_use"))
        except ValueError:
            retention = None
    params = {"kvcache": about["kvcache"]} if "kvcache" in about else None
    return ReqContext(req_id, params, retention)


_ANSWERS = {
    Op.TIER_LOOKUP: "lookups", Op.TIER_SUBMIT: "submits", Op.TIER_FINISHED: "reports", Op.TIER_RAISED: "raising"
}  # fmt: skip


def answers_of(call: Call, tier: int) -> dict[str, list[Any]]:
    """Return the answers that a tier gave during a call, as arguments of `ScriptedTier.expect`."""
    answers: dict[str, list[Any]] = {}
    for one in call.inputs:
        if one.tier == tier and one.op in _ANSWERS:
            answers.setdefault(_ANSWERS[one.op], []).append(one.value)
    return answers


def _answer(answer: Any) -> Answer:
    if answer is None or isinstance(answer, int | str):
        return answer  # a bool, too
    if isinstance(answer, PrepareStoreOutput):
        return Stored(Keys(answer.keys_to_store), len(answer.evicted_keys), block_ids_of(answer.store_spec) or [])
    ids = block_ids_of(answer)
    return type(answer).__name__ if ids is None else ids


def replay_recording(
    recording: Recording,
    policy: str | type | None = None,
    check: Callable[[Runner], Callable[[Call, Answer], str]] | None = None,
) -> ReplayOutcome:
    """Replay the calls of a recording, up to the first different answer.

    `check`, called with a `Runner` before its first call, returns a function that takes every call and its answer, and
    returns a description of the fault, or "". RecordingError if the manager cannot be created, or no call can be
    replayed.
    """
    config = recording.header["manager"]
    is_from_start = recording.is_whole and bool(recording.header.get("is_from_start"))

    def begin() -> tuple[Runner, Callable[[Call, Answer], str]]:
        runner = Runner(config, policy)
        return runner, (lambda call, answer: "") if check is None else check(runner)

    runner, inspect = begin() if is_from_start else (None, None)
    difference = None
    num_calls = num_skipped = 0
    for record in recording:
        if record.op is Op.LOST:
            runner, is_from_start = None, False
            continue
        if runner is None and record.op is Op.RESET_CACHE and "tiers" not in config:
            # A reset makes all earlier calls irrelevant.
            runner, inspect = begin()
        if runner is None or inspect is None:
            num_skipped += record.op not in NOTES and record.op is not Op.STATS
            continue
        if record.op in NOTES:
            runner.note(record)
        elif record.op is not Op.STATS:
            got = runner.run(record)
            num_calls += 1
            reason = inspect(record, got)
            if got != record.answer or reason:
                difference = Difference(record, record.answer, got, reason if got == record.answer else "")
        elif is_from_start:
            difference = _compare_stats(runner, record)
        if difference is not None:
            break
    if not num_calls and num_skipped:
        where = "with its start lost" if not recording.is_whole else "of a manager that was at work already"
        raise RecordingError(
            f"{recording.path} is a recording {where}, and has no reset that a replay could begin at; "
            "kvcache plan reads it as a trace"
        )
    removed = () if runner is None else tuple(sorted(runner.removed))
    return ReplayOutcome(num_calls, num_skipped, recording.num_lost, difference, recording.end, removed)


def _compare_stats(runner: Runner, record: Call) -> Difference | None:
    recorded = record.flag if isinstance(record.flag, dict) else {}
    ours = runner.stats()
    known = sorted(ours.keys() & recorded.keys())
    expected, got = {name: recorded[name] for name in known}, {name: ours[name] for name in known}
    if expected == got:
        return None
    return Difference(record, str(expected), str(got))


def is_expected_error(name: str) -> bool:
    """Return whether a manager raises an error of this name for bad arguments."""
    return any(name == error.__name__ for error in _EXPECTED_ERRORS)
