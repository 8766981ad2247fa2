"""BlockPool: the operations of a cache of blocks, with admission, clock, counters and events.

Managers and the tiers' indexes use it, so that every stored or evicted block is counted and reported in one place.
Every loop over blocks is in the cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcache.block import ABSENT, READY
from kvcache.control.backend import Backend, CPUBackend
from kvcache.control.generic_cache import GenericBlockCache
from kvcache.control.pool_clock import PoolClock
from kvcache.control.reuse_filter import ReuseFilter
from kvcache.core.event_log import EventLog
from kvcache.events import OffloadingEvent
from kvcache.hints import actions_of, own_use
from kvcache.keys import as_key_list
from kvcache.metrics import MANAGER_METRICS, EventStats, ManagerStats, Part, PolicyStats
from kvcache.options import check_int, check_windows
from kvcache.policies.base import CachePolicy
from kvcache.registry import POLICIES
from kvcache.request import ReqContext, RequestAges, check_next_use
from kvcache.specs import CPULoadStoreSpec, LoadStoreSpec, PrepareStoreOutput

if TYPE_CHECKING:
    from kvcache.policies.base import BlockCacheOps

_LOG = logging.getLogger(__name__)
MAX_BLOCKS = 1 << 30
Keys = Iterable[bytes]


def _inner(path: str, doc: str) -> Any:
    """Return a property that reads an attribute of a part of its object."""
    return property(attrgetter(path), doc=doc)


class _Offers:
    """Offers of blocks to store: which requests may store, and the number of absent blocks.

    An engine offers the blocks of a refused store again: they count once.
    """

    def __init__(self) -> None:
        self.ages = RequestAges()
        self.num_blocks = 0

    def count(self, num_offered: int, req_context: ReqContext | None, is_refused: bool = False) -> None:
        """Count the absent blocks of one store."""
        # The request itself keeps the number of its blocks that were counted and not stored.
        notes = {} if req_context is None else req_context.request_keys
        num_counted = notes.get(self, 0)
        self.num_blocks += max(0, num_offered - num_counted)
        if is_refused or num_counted:
            notes[self] = max(num_offered, num_counted) if is_refused else max(0, num_counted - num_offered)


class BlockPool:
    """Blocks of one medium under one policy.

    Parameters
    ----------
    num_blocks : int
        Slots, >= 1 and < 2**30.
    medium : str
        The medium's name in events.
    backend : Backend, optional
        Allocates the blocks. Default: a pool of slots.
    cache_policy, block_size, enable_events, store_threshold, max_tracker_size, clock, group_windows
        As for `kvcache.CPUOffloadingManager`.

    Attributes
    ----------
    events : EventLog or None
        Callers may also add their own events.
    loaded_blocks, stored_blocks, evicted_blocks, rejected_stores, failed_blocks, ignored_hints : int
        Counters, see `kvcache.metrics.MANAGER_METRICS`.

    Raises
    ------
    ValueError
        A value is out of range or of the wrong type, or the policy is unknown.

    Notes
    -----
    `keys` is any iterable of keys and is consumed once; a list is the fast path. If `is_move` is true, the blocks move
    between tiers: they do not count as the engine's, and skip admission. Counters are exact under the GIL, because no
    call separates the read and the write of one. Free-threaded builds may miss a count if threads collide.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str | type = "lru",
        *,
        block_size: int = 1,
        medium: str = CPULoadStoreSpec.medium(),
        backend: Backend | None = None,
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        clock: Callable[[], float] = time.monotonic,
        group_windows: Sequence[int | None] | None = None,
    ) -> None:
        check_int("block_size", block_size)
        if check_int("num_blocks", num_blocks) >= MAX_BLOCKS:
            raise ValueError(f"num_blocks must be < 2**30, got {num_blocks}")
        check_int("store_threshold", store_threshold, 0)
        self.num_blocks = num_blocks
        self.block_size, self.medium = block_size, medium
        self._options: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "cache_policy": cache_policy,
            "enable_events": bool(enable_events),
            "store_threshold": store_threshold,
            "max_tracker_size": max_tracker_size,
            "backend": backend,
        }
        self._cache = self._make_cache(cache_policy, backend, group_windows)
        if group_windows is not None:
            self._options["group_windows"] = list(group_windows)
        self._admission = ReuseFilter(store_threshold, max_tracker_size) if store_threshold > 1 else None
        self.ignored_hints = 0
        self.time = PoolClock(clock, self.policy.reads_clock)
        self.events: EventLog | None = None
        if enable_events:
            self.events = EventLog(block_size)
            self._cache.keep_events(self.events, medium)
        self.loaded_blocks = self.stored_blocks = self.evicted_blocks = 0
        self.rejected_stores = self.failed_blocks = 0
        self._offers = _Offers()

    def _make_cache(
        self, cache_policy: str | type, backend: Backend | None, group_windows: Sequence[int | None] | None
    ) -> BlockCacheOps:
        policy_type = POLICIES.resolve(cache_policy)
        windows = [None] if group_windows is None else check_windows(group_windows)
        if len(windows) > 1:
            if policy_type.group_policy is None or backend is not None:
                where = "a custom backend" if backend is not None else f"the policy {policy_type.__name__}"
                raise ValueError(f"{where} has no rule for several KV-cache groups; leave out group_windows={windows}")
            policy_type = POLICIES.resolve(policy_type.group_policy)
        policy: CachePolicy = policy_type(self.num_blocks)
        if len(windows) > 1:
            policy.set_group_windows(windows)  # type: ignore[attr-defined]
        if backend is None:
            native = policy.native(self.num_blocks)
            if native is not None:
                return native
            backend = CPUBackend(self.block_size, self.num_blocks)
        return GenericBlockCache(policy, backend, self.num_blocks, self._note_evicted)

    @property
    def policy(self) -> CachePolicy:
        """The policy that chooses which blocks are evicted."""
        return self._cache.current_policy()

    _policy = policy

    num_free: int = _inner("_cache.num_free", "Slots that hold no block.")
    num_referenced: int = _inner("_cache.num_referenced", "Blocks with at least one reference.")
    num_pending: int = _inner("_cache.num_pending", "Blocks being written.")
    lookups: int = _inner("_cache.lookups", "Number of counted look-ups.")
    looked_up_blocks: int = _inner("_cache.looked_up_blocks", "Number of keys in the counted look-ups.")
    hit_blocks: int = _inner("_cache.hit_blocks", "Number of keys in the look-ups that were ready.")
    gated_blocks: int = _inner("_cache.gated_blocks", "Number of blocks that were offered and not admitted.")
    declined_blocks: int = _inner("_cache.declined_blocks", "Gated blocks that the policy declined.")
    ages: RequestAges = _inner("_offers.ages", "Which open requests are older than the last reset, and store nothing.")

    @property
    def group_windows(self) -> list[int | None] | None:
        """The window of each KV-cache group in blocks, if it is configured."""
        return self._options.get("group_windows")

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds that never go back."""
        return self.time.read

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.time.read = clock

    @property
    def needed_blocks(self) -> int:
        """Blocks of requests that were loaded, or offered for storing and absent, stored or not."""
        return self.loaded_blocks + self._offers.num_blocks

    def configuration(self) -> dict[str, Any]:
        """Return the configuration of a pool that gives the same answers, in JSON types.

        Returns
        -------
        dict
            Arguments of `CPUOffloadingManager` by name; the policy as a name or ``"package.module:Class"``.

        Raises
        ------
        ValueError
            A backend allocates the blocks, so the configuration cannot be named.
        """
        options = dict(self._options)
        backend = options.pop("backend")
        if backend is not None and type(backend) is not CPUBackend:
            raise ValueError(f"blocks are allocated by a {type(backend).__name__}, whose choices are not known here")
        options["cache_policy"] = POLICIES.path_of(options["cache_policy"])
        return options

    def stats(self) -> ManagerStats:
        """Return counters since the start and current gauges. Counters of tiers are 0."""
        return ManagerStats(**{metric.name: getattr(self, metric.name, 0) for metric in MANAGER_METRICS})

    def parts(self) -> list[Part]:
        """Return all statistics by component. May be called from any thread."""
        parts = [Part("", self.stats())]
        try:
            for name, value in self.policy.gauges().items():
                parts.append(Part("policy", PolicyStats(float(value)), (("name", name),)))
        except Exception:
            # An error of a plug-in must not hide the other statistics. A warning at every scrape would be too much.
            _LOG.debug("the policy's gauges failed", exc_info=True)
        if self.events is not None:
            parts.append(Part("event", EventStats(len(self.events), self.events.num_dropped)))
        return parts

    def _request_keys_of(self, req_context: ReqContext | None) -> Any:
        if req_context is None:
            return None
        try:
            request_keys = req_context.request_keys.get(self)
        except AttributeError:
            raise _bad_context(req_context) from None
        return self._open(req_context) if request_keys is None else request_keys

    def _open(self, req_context: ReqContext) -> Any:
        actions = actions_of(req_context)
        if reasons := [action.reason for action in actions if action.reason]:
            if not self.ignored_hints:
                _LOG.warning("ignoring a retention hint: %s", reasons[0])
            self.ignored_hints += 1
        # The positions contain all keys of the prompt: allocate the index for all of them.
        num_keys = len(req_context.positions or ())
        request_keys = self._cache.open_request(own_use(actions) if actions else None, num_keys)
        self._offers.ages.open(req_context)
        # Another thread, or a finalizer, may have opened the request in the meantime.
        return req_context.request_keys.setdefault(self, request_keys)

    def reorder(self, req_context: ReqContext) -> None:
        """Order the keys that a running request used, by position if known, so that its head is evicted after its tail.

        Counts no use. The total cost of all calls for a request is linear in its keys.
        """
        request_keys = self._request_keys_of(req_context)
        if request_keys is not None:
            self._cache.reorder(request_keys, req_context.positions)

    def end_request(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        """Order all keys that a request has used, and forget the request.

        With `use_positions`, first count a use of every key with a position in the context.
        """
        try:
            request_keys_by_pool = req_context.request_keys
        except AttributeError:
            raise ValueError(f"req_context must be a ReqContext, got {req_context!r}") from None
        request_keys = request_keys_by_pool.pop(self, None)
        if request_keys is None and use_positions and req_context.positions:
            request_keys = self._open(req_context)
            request_keys_by_pool.pop(self, None)
        if request_keys is not None:
            self._cache.end_request(request_keys, req_context.positions, use_positions)
            if request_keys.num_seen:
                # Beside the keys of a running request, under a key of its own.
                request_keys_by_pool[self._cache] = request_keys
        self._offers.ages.close(req_context)

    def hint(self, request_or_keys: ReqContext | Keys, next_use: str) -> None:
        """Set when blocks will be used next; see `OffloadingManager.hint`."""
        check_next_use(next_use)
        keys: list[bytes] | None = None
        kept: Any = None
        positions: dict[bytes, int] | None = None
        if isinstance(request_or_keys, ReqContext):
            kept = self._keys_last_used(request_or_keys)
            positions = request_or_keys.positions
        else:
            keys = as_key_list(request_or_keys)
        if self.time.is_needed:
            self.time.advance(self._cache)
        self._cache.take_hint(keys, kept, positions, next_use)

    def _keys_last_used(self, req_context: ReqContext) -> Any:
        """Return the keys of a running request. If it used none, return those of the context's last ended request."""
        for kept in map(req_context.request_keys.get, (self, self._cache)):
            if kept is not None and self._cache.has_used(kept):
                return kept
        return self._request_keys_of(req_context)

    def lookup(self, keys: Any = None, req_context: ReqContext | None = None, *, key: Any = None) -> bool | int:
        """Return whether one key is ready, or the number of leading ready keys, and count the look-up.

        See `OffloadingManager.lookup`.
        """
        if type(keys) is not list:
            if keys is None:
                keys = key
            if isinstance(keys, bytes):
                if req_context is not None and not isinstance(req_context, ReqContext):
                    raise _bad_context(req_context)
                if req_context is not None and (ages := self._offers.ages) not in req_context.request_keys:
                    ages.open(req_context)
                # Engines often look up key by key: a single key needs no keys of the request.
                return self._cache.status_of(keys) == READY
            keys = as_key_list(keys)
        return self._cache.lookup(keys, None if req_context is None else self._request_keys_of(req_context))

    def status(self, key: bytes) -> int:
        """Return the `BlockState` of one key, and count a look-up."""
        return self._cache.status_of(key)

    def count_lookup(self, num_keys: int) -> None:
        """Count a look-up that the caller answers with `match_prefix`; see `count_hits`."""
        cache = self._cache
        cache.lookups += 1
        cache.looked_up_blocks += num_keys

    def count_hits(self, num_hits: int) -> None:
        """Count the hits of a look-up that `count_lookup` has counted."""
        self._cache.hit_blocks += num_hits

    def note_found(self, req_context: ReqContext, end_token: int) -> None:
        """Record where in the prompt the leading run of blocks ends that memory and tiers hold, for several groups."""
        self._request_keys_of(req_context).found_position = end_token

    def states(self, keys: list[bytes]) -> bytes:
        """Return the `BlockState` of each key as one byte. Counts no look-up."""
        return self._cache.status(keys)

    def locate(self, keys: list[bytes]) -> list[int]:
        """Return the id of each key's block, or -1 if it is absent or being written. Takes no reference."""
        return self._cache.locate(keys)

    def match_prefix(self, keys: list[bytes], req_context: ReqContext | None = None, start: int = 0) -> int:
        """Return the end of the run of ready keys from `start` on. Counts neither a look-up nor a use."""
        return self._cache.match_prefix(keys, self._request_keys_of(req_context), start)

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        """Mark blocks as recently used. `keys` are in prefix order, and the first one becomes the most recent."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        request_keys = None if req_context is None else self._request_keys_of(req_context)
        if self.time.is_needed and (req_context is None or self._cache.needs_time(request_keys, req_context.positions)):
            self.time.advance(self._cache)
        self._cache.touch(keys, request_keys)

    def pin(self, keys: Keys, req_context: ReqContext | None = None, *, is_move: bool = False) -> LoadStoreSpec:
        """Take a reference on each block, until `unpin`; see `OffloadingManager.prepare_load`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        request_keys = None if req_context is None else self._request_keys_of(req_context)
        if self.time.is_needed and (req_context is None or self._cache.needs_time(request_keys, req_context.positions)):
            self.time.advance(self._cache)
        spec = self._cache.pin(keys, request_keys)
        if not is_move:
            num_keys = len(keys)
            self.loaded_blocks += num_keys
        return spec

    def unpin(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        """Release references that `pin` took; see `OffloadingManager.complete_load`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self._cache.unpin(keys, None if req_context is None else self._request_keys_of(req_context))

    def reserve(
        self, keys: Keys, req_context: ReqContext | None = None, *, is_move: bool = False, may_decline: bool = False
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the absent keys; see `OffloadingManager.prepare_store`.

        With `may_decline`, a policy that `stores_all` may decline these keys.
        """
        if type(keys) is not list:
            keys = as_key_list(keys)
        request_keys = None if req_context is None else self._request_keys_of(req_context)
        if self.time.is_needed and (req_context is None or self._cache.needs_time(request_keys, req_context.positions)):
            self.time.advance(self._cache)
        admitted = None
        ages = self._offers.ages
        if ages.num_resets and ages.predates(req_context):
            admitted = bytearray(len(keys))
        elif self._admission is not None and not is_move:
            admitted = self._admission.admit(keys)
        num_gated = self._cache.gated_blocks
        if may_decline:
            self.policy.stores_all = False
        try:
            output = self._cache.reserve(keys, request_keys, admitted)
        finally:
            if may_decline:
                self.policy.stores_all = True
        if output is None:
            if not is_move:
                self.refuse(keys, req_context)
            return None
        num_evicted = len(output.evicted_keys)
        self.evicted_blocks += num_evicted
        if not is_move:
            # Present keys do not count as misses: an engine may offer blocks that it has just loaded.
            num_missed = len(output.keys_to_store) + self._cache.gated_blocks - num_gated
            self._offers.count(num_missed, req_context)
        return output

    def refuse(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Count a store of an engine that is refused."""
        self.rejected_stores += 1
        num_absent = self._cache.status(list(dict.fromkeys(keys))).count(ABSENT)
        self._offers.count(num_absent, req_context, is_refused=True)

    def reserve_leading(self, keys: list[bytes]) -> PrepareStoreOutput | None:
        """Reserve slots for the longest prefix of `keys` that fits, for a move. Return None if none fits."""
        keys = keys[: self.num_blocks - self._cache.num_referenced - self._cache.num_pending]
        while keys:
            output = self.reserve(keys, is_move=True)
            if output is not None:
                return output
            keys = keys[: len(keys) // 2]
        return None

    def _note_evicted(self, keys: list[bytes]) -> None:
        num_keys = len(keys)
        self.evicted_blocks += num_keys

    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        """Mark an engine's written blocks as ready and count them. If `success` is False, drop them.

        Unknown keys are ignored. If `req_context` is a bool, it is `success`.
        """
        if req_context is True or req_context is False:
            success, req_context = req_context, None
        if type(keys) is not list:
            keys = as_key_list(keys)
        if self._offers.ages.num_resets and self.is_of_before(keys, req_context):
            return
        if success:
            self.commit(keys, req_context)
        else:
            self.abort(keys, req_context)

    def is_of_before(self, keys: list[bytes], req_context: ReqContext | None) -> bool:
        """Return whether an ending store began before the last reset, so that its blocks may be another request's.

        ValueError: a key is invalid.
        """
        if not self._offers.ages.predates(req_context):
            return False
        self._cache.status(keys)
        return True

    def commit(self, keys: list[bytes], req_context: ReqContext | None = None, *, is_move: bool = False) -> list[bytes]:
        """Mark written blocks as ready, and return their keys. Unknown and ready keys are ignored."""
        ready = self._cache.commit(keys, self._request_keys_of(req_context))
        if not is_move:
            num_ready = len(ready)
            self.stored_blocks += num_ready
        return ready

    def abort(self, keys: list[bytes], req_context: ReqContext | None = None, *, is_move: bool = False) -> int:
        """Drop blocks that were being written, free their slots in the order given, and return their number."""
        # A store may fail after the end of its request, whose keys a policy needs to undo it.
        known = req_context if isinstance(req_context, ReqContext) else None
        request_keys = self._request_keys_of(req_context) if known is None else self._keys_last_used(known)
        num_dropped = self._cache.abort(keys, request_keys)
        if not is_move:
            self.failed_blocks += num_dropped
        return num_dropped

    def take_events(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        """Take out the events since the last call, or the first `max_events` of them. Each is returned once."""
        return iter(()) if self.events is None else self.events.take(max_events)

    def reset(self) -> None:
        """Forget all blocks, requests, ghosts, offers and events. Block ids start again at 0."""
        self._cache.reset()
        if self._admission is not None:
            self._admission.clear()

    def withhold(self, block_ids: list[int]) -> None:
        """Keep these free slots unused until `give_back`. The cost is linear in their number."""
        self._cache.withhold(block_ids)

    def give_back(self, block_ids: list[int]) -> None:
        """Free withheld slots."""
        self._cache.give_back(block_ids)


def _bad_context(req_context: object) -> ValueError:
    return ValueError(f"req_context must be a ReqContext or None, got {req_context!r}")
