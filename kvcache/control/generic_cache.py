"""The batch operations in terms of a policy's five primitives.

They are the default for plug-ins, and tests compare compiled policies, whose own batch operations loop over rows, with
them. What a whole manager does is specified in `kvcache.testing.reference_manager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcache.block import ABSENT, PENDING, READY, BlockStateError, BlockStatus
from kvcache.control.atomic import Guard, atomic
from kvcache.policies.base import CachePolicy, RequestUses
from kvcache.specs import PrepareStoreOutput

if TYPE_CHECKING:
    from kvcache.core.event_log import EventLog
    from kvcache.specs import LoadStoreSpec

    Backend = Any  # kvcache.control.backend.Backend is in a higher layer


class GenericBlockCache:
    """The batch operations of a policy that implements only the five primitives, over a backend's blocks.

    `policy` is empty, and only this cache calls it. `backend` allocates the blocks, and both hold `capacity` blocks. If
    one of them fails after an operation has evicted keys, the operation returns nothing, and these keys are passed to
    `on_evicted`.

    Policy and backend may be foreign code and may raise anywhere. This class keeps its own record of resident blocks
    and does not query the policy. Every operation keeps the record consistent: a key has a slot and is
    counted, or neither.
    """

    def __init__(
        self,
        policy: CachePolicy,
        backend: Backend,
        capacity: int,
        on_evicted: Callable[[list[bytes]], None] = lambda keys: None,
    ) -> None:
        self._policy = policy
        self._backend = backend
        self._capacity = capacity
        self._on_evicted = on_evicted
        self._log: tuple[EventLog, str] | None = None  # and the medium's name
        self._resident: dict[bytes, BlockStatus] = {}
        # Keys that other requests than their storer have used. Each reset makes a new set, which identifies the epoch.
        self._shared: set[bytes] = set()
        self._withheld: dict[int, BlockStatus] = {}
        self.guard = Guard()
        self.num_referenced = self.num_pending = 0
        self.lookups = self.looked_up_blocks = self.hit_blocks = 0
        self.gated_blocks = self.declined_blocks = 0

    def current_policy(self) -> CachePolicy:
        return self._policy

    def keep_events(self, events: EventLog, medium: str) -> None:
        self._log = events, medium

    def _announce(self, keys: list[bytes], removed: bool) -> None:
        if self._log is not None:
            events, medium = self._log
            events.add(keys, medium, removed)

    @property
    def num_free(self) -> int:
        return int(self._backend.get_num_free_blocks())

    def open_request(self, next_use: str | None = None, num_keys: int = 0) -> RequestUses:
        # Hints are soft, so a policy may ignore them.
        request = RequestUses(next_use)
        request.epoch = self._shared
        return request

    def _keys_of(self, request_keys: RequestUses) -> dict[bytes, int]:
        if request_keys.epoch is not self._shared:
            # The keys were named before a reset: clear them.
            request_keys.forget()
            request_keys.epoch = self._shared
        return request_keys.keys

    def advance(self, elapsed_s: float) -> None:
        # Round as the compiled cache does.
        self._policy.now_ms = round(elapsed_s * 1e9) // 1_000_000  # type: ignore[attr-defined]

    @atomic
    def needs_time(self, request_keys: RequestUses, positions: dict[bytes, int] | None) -> bool:
        request_keys.positions = positions
        return not self._keys_of(request_keys)

    @atomic
    def has_used(self, request_keys: RequestUses) -> bool:
        return bool(self._keys_of(request_keys))

    def lookup(self, keys: list[bytes], request_keys: RequestUses | None) -> int:
        num_ready: int = self.match_prefix(keys, request_keys)
        self.lookups += 1
        self.looked_up_blocks += len(keys)
        self.hit_blocks += num_ready
        return num_ready

    @atomic
    def match_prefix(self, keys: list[bytes], request_keys: RequestUses | None, start: int = 0) -> int:
        if not 0 <= start <= len(keys):
            raise ValueError(f"start must be in 0..{len(keys)}, got {start}")
        for i in range(start, len(keys)):
            if self._state_of(keys[i]) != READY:
                return i
        return len(keys)

    @atomic
    def status_of(self, key: bytes) -> int:
        state = self._state_of(key)
        self.lookups += 1
        self.looked_up_blocks += 1
        self.hit_blocks += state == READY
        return state

    @atomic
    def status(self, keys: list[bytes]) -> bytes:
        return bytes([self._state_of(key) for key in keys])

    def _state_of(self, key: bytes) -> int:
        _check_key(key)
        block = self._resident.get(key)
        return ABSENT if block is None else READY if block.ref_cnt >= 0 else PENDING

    @atomic
    def locate(self, keys: list[bytes]) -> list[int]:
        return [int(self._resident[key].block_id) if self._state_of(key) == READY else -1 for key in keys]

    @atomic
    def withhold(self, block_ids: Iterable[int]) -> None:
        """Withhold free slots: allocate every free block once, and keep the wanted ones."""
        slots = set(block_ids)
        free = self._backend.allocate_blocks([b"withheld-%d" % i for i in range(self.num_free)])
        blocks = {block.block_id: block for block in free}
        missing = slots - blocks.keys()
        self._free(block for block in reversed(free) if missing or block.block_id not in slots)
        if missing:
            raise BlockStateError(f"slots are not free: {sorted(missing)}")
        self._withheld.update((block_id, blocks[block_id]) for block_id in slots)

    @atomic
    def give_back(self, block_ids: Iterable[int]) -> None:
        ids = list(dict.fromkeys(block_ids))
        missing = [block_id for block_id in ids if block_id not in self._withheld]
        if missing:
            raise BlockStateError(f"slots are not withheld: {missing}")
        self._free([self._withheld.pop(block_id) for block_id in ids])

    @atomic
    def touch(self, keys: list[bytes], request_keys: RequestUses | None) -> None:
        _check_keys(keys)
        if request_keys is None:
            if keys:
                self._policy.touch(keys)
                self._shared.update(self._resident.keys() & keys)
        elif self._count(keys, request_keys) < len(keys):
            self._policy.order(keys)

    def _count(self, keys: list[bytes], request_keys: RequestUses | None) -> int:
        if request_keys is None:
            return 0
        seen = self._keys_of(request_keys)
        request_keys.read_positions()
        unseen = [key for key in dict.fromkeys(keys) if key not in seen]
        if not unseen:
            return 0
        request_keys.add(unseen)
        try:
            if hasattr(self._policy, "count_uses"):
                self._policy.count_uses(unseen, request_keys)
            else:
                self._policy.use(unseen, first=len(seen) == len(unseen))
        except BaseException:
            request_keys.take_back(unseen)
            raise
        self._shared.update(self._resident.keys() & unseen)
        return len(unseen)

    @atomic
    def pin(self, keys: list[bytes], request_keys: RequestUses | None) -> LoadStoreSpec:
        _check_keys(keys)
        blocks = []
        for key in keys:
            block = self._known(key)
            if block.ref_cnt < 0:
                raise BlockStateError(f"block is not ready: {key!r}")
            blocks.append(block)
        spec: LoadStoreSpec = self._backend.get_load_store_spec(keys, blocks)
        self._count(keys, request_keys)
        for block in blocks:
            if block.ref_cnt == 0:
                self.num_referenced += 1
            block.ref_cnt += 1
        return spec

    @atomic
    def unpin(self, keys: list[bytes], request_keys: RequestUses | None) -> None:
        _check_keys(keys)
        releases: Counter[bytes] = Counter()
        for key in keys:
            releases[key] += 1
            if self._known(key).ref_cnt < releases[key]:
                raise BlockStateError(f"block has fewer references than are given back: {key!r}")
        for key, count in releases.items():
            block = self._known(key)
            block.ref_cnt -= count
            if block.ref_cnt == 0:
                self.num_referenced -= 1

    @atomic
    def reserve(
        self, keys: list[bytes], request_keys: RequestUses | None, admit: bytearray | None = None
    ) -> PrepareStoreOutput | None:
        _check_keys(keys)
        named: dict[bytes, bool] = {}
        for i, key in enumerate(keys):
            named.setdefault(key, admit is None or admit[i] == 1)
        blocks = {key: self._resident.get(key) for key in named}
        new = [key for key, admitted in named.items() if admitted and blocks[key] is None]
        num_absent = sum(block is None for block in blocks.values())
        # A backend may have more free blocks than the policy has room for.
        num_free = min(self.num_free, self._capacity - len(self._resident))
        if not self._policy.declines:
            protected = sum(block is not None and block.ref_cnt == 0 for block in blocks.values())
            num_evictable = len(self._resident) - self.num_referenced - self.num_pending
            if len(new) > num_free + max(0, num_evictable - protected):
                return None
        self._count(keys, request_keys)
        room = self._make_room(new, num_free, named, request_keys)
        if room is None:
            return None
        num_taken, victims = room
        taken = new[:num_taken]
        spec = self._replace(victims, taken)
        if request_keys is not None:
            request_keys.stored.update((key, self._resident[key]) for key in taken)
        self.declined_blocks += len(new) - num_taken
        self.gated_blocks += num_absent - num_taken
        return PrepareStoreOutput(taken, spec, list(victims))

    def _make_room(
        self, new: list[bytes], num_free: int, named: dict[bytes, bool], request_keys: RequestUses | None
    ) -> tuple[int, dict[bytes, BlockStatus]] | None:
        """Call the policy to select victims for the leading `new` keys that it accepts, and validate its answer.

        Return the number of accepted keys, and the victims. Return None if the policy found too few victims.
        """
        num_taken, call = len(new), "make_room" if self._policy.declines else "evict"
        answer: Any = []
        try:
            if self._policy.declines:
                num_taken, answer = self._policy.make_room(new, num_free, list(named), request_keys)
            elif num_taken > num_free:
                answer = self._policy.evict(num_taken - num_free, set(named))
                if answer is None:
                    return None
            victims = dict(answer)
            fault = self._fault_of(max(0, num_taken - num_free), named, len(answer), victims)
            if not 0 <= num_taken <= len(new):
                fault = f"took {num_taken} of {len(new)} keys"
            if fault is not None:
                raise BlockStateError(f"{type(self._policy).__name__}.{call} {fault}")
        except BaseException:
            self._put_back()
            raise
        return num_taken, victims

    def _fault_of(
        self, needed: int, protected: dict[bytes, bool], num_answered: int, victims: dict[bytes, BlockStatus]
    ) -> str | None:
        fault = None
        if num_answered != needed or len(victims) != needed:
            fault = f"returned {num_answered} victims, exactly {needed} different ones were asked for"
        for key, block in victims.items():
            if self._resident.get(key) is not block:
                fault = f"returned a block that is not in the cache: {key!r}"
            elif block.ref_cnt != 0 or key in protected:
                fault = f"returned a block that must stay: {key!r}, {block!r}"
            elif self._policy.get(key) is not None:
                fault = f"returned a block that it still holds: {key!r}"
        return fault

    def _put_back(self) -> None:
        """Insert resident keys that a faulty policy has dropped, so that a faulty plug-in loses no data."""
        for key, block in self._resident.items():
            with suppress(Exception):
                if self._policy.get(key) is None:
                    self._policy.insert(key, block)

    def _replace(self, victims: dict[bytes, BlockStatus], new: list[bytes]) -> LoadStoreSpec:
        """Free the victims' slots and insert all new keys. If that fails, insert none, and report the victims."""
        allocated: list[BlockStatus] = []
        inserted: list[bytes] = []
        for key in victims:
            del self._resident[key]
        self._shared.difference_update(victims)
        # The victims are evicted, even if the new keys fail.
        self._announce(list(victims), True)
        try:
            self._free(victims.values())
            if new:
                allocated = self._backend.allocate_blocks(new)
            if len(allocated) != len(new):
                raise BlockStateError(f"backend allocated {len(allocated)} blocks, {len(new)} were asked for")
            spec: LoadStoreSpec = self._backend.get_load_store_spec(new, allocated)
            for key, block in zip(new, allocated, strict=True):
                inserted.append(key)
                self._policy.insert(key, block)
        except BaseException:
            for key in inserted:
                with suppress(Exception):
                    self._policy.remove(key)
            with suppress(Exception):
                self._free(allocated)
            if victims:
                self._on_evicted(list(victims))
            raise
        self._resident.update(zip(new, allocated, strict=True))
        self.num_pending += len(new)
        return spec

    def _free(self, blocks: Iterable[BlockStatus]) -> None:
        """Free every block. Afterwards, raise the backend's first error."""
        fault: Exception | None = None
        for block in blocks:
            try:
                self._backend.free(block)
            except Exception as error:
                fault = fault or error
        if fault is not None:
            raise fault

    @atomic
    def commit(self, keys: list[bytes], request_keys: RequestUses | None) -> list[bytes]:
        _check_keys(keys)
        ready = []
        for key in keys:
            block = self._resident.get(key)
            if block is not None and block.ref_cnt < 0:
                block.ref_cnt = 0
                ready.append(key)
        self.num_pending -= len(ready)
        self._announce(ready, False)
        return ready

    @atomic
    def abort(self, keys: list[bytes], request_keys: RequestUses | None) -> int:
        _check_keys(keys)
        fault: Exception | None = None
        dropped: list[BlockStatus] = []
        for key in dict.fromkeys(keys):
            block = self._resident.get(key)
            if block is None or block.ref_cnt >= 0:
                continue
            try:
                self._policy.remove(key)
            except Exception as error:
                fault = fault or error
                if self._holds(key):
                    continue  # no change: it is still being written
            del self._resident[key]
            self._shared.discard(key)
            dropped.append(block)
        self.num_pending -= len(dropped)
        self._free(dropped)
        if fault is not None:
            raise fault
        return len(dropped)

    def _holds(self, key: bytes) -> bool:
        try:
            return self._policy.get(key) is not None
        except Exception:
            return True

    @atomic
    def reorder(self, request_keys: RequestUses, positions: dict[bytes, int] | None) -> None:
        # Reorder all keys each time: with five primitives, a block cannot be placed behind another.
        self._order_used(request_keys, positions)

    @atomic
    def end_request(
        self, request_keys: RequestUses, positions: dict[bytes, int] | None, use_positions: bool = False
    ) -> None:
        if use_positions and positions:
            by_position = sorted(positions, key=positions.__getitem__)
            _check_keys(by_position)
            self._count(by_position, request_keys)
        keys = self._order_used(request_keys, positions)
        request_keys.has_ended = True
        if request_keys.next_use == "end":
            self._policy.demote(self._own(keys, request_keys))

    def _own(self, keys: list[bytes], request_keys: RequestUses) -> list[bytes]:
        """Return those of the keys that the request has stored and no other one has used."""
        own = {key for key, block in request_keys.stored.items() if self._resident.get(key) is block}
        return [key for key in keys if key in own and key not in self._shared]

    @atomic
    def take_hint(
        self,
        keys: list[bytes] | None,
        request_keys: RequestUses | None,
        positions: dict[bytes, int] | None,
        next_use: str,
    ) -> None:
        if keys is not None:
            _check_keys(keys)
        elif request_keys is not None:
            keys = list(self._keys_of(request_keys))
            if positions is not None:
                keys = sorted_by_position(keys, positions)
            request_keys.next_use = next_use
        if hasattr(self._policy, "hint"):
            # Also called without keys: a policy may read its clock here, as the compiled policies do.
            self._policy.hint(keys or [], next_use)
        if next_use == "end" and keys and (request_keys is None or request_keys.has_ended):
            self._policy.demote(keys if request_keys is None else self._own(keys, request_keys))

    def _order_used(self, request_keys: RequestUses, positions: dict[bytes, int] | None) -> list[bytes]:
        keys = list(self._keys_of(request_keys))
        if positions is not None:
            keys = sorted_by_position(keys, positions)
        self._policy.order(keys)
        return keys

    @atomic
    def reset(self) -> None:
        policy = self._policy
        try:
            policy.clear()
        except Exception:
            # `clear` is not implemented, or it failed: a new instance is empty, too.
            try:
                policy = type(policy)(self._capacity)
                policy.stores_all = self._policy.stores_all
            except BaseException:
                self._put_back()
                raise
        resident, self._resident = self._resident, {}
        withheld, self._withheld = self._withheld, {}
        self._shared = set()
        self._policy = policy
        self.num_referenced = self.num_pending = 0
        if self._log is not None:
            self._log[0].clear()
        try:
            self._free([*resident.values(), *withheld.values()])
        finally:
            self._backend.reset()

    def _known(self, key: bytes) -> BlockStatus:
        block = self._resident.get(key)
        if block is None:
            raise KeyError(f"block is not in the cache: {key!r}")
        return block


def sorted_by_position(keys: list[bytes], positions: dict[bytes, int]) -> list[bytes]:
    """Return `keys` by position in the prompt. A key without one stays behind the key that was named before it."""
    known = []
    last = -1
    for key in keys:
        last = positions.get(key, last)
        known.append(last)
    return [keys[i] for i in sorted(range(len(keys)), key=known.__getitem__)]


def _check_key(key: object) -> None:
    if type(key) is not bytes or not key:
        raise ValueError(f"key must be exact, non-empty bytes, got {key!r}")


def _check_keys(keys: list[bytes]) -> None:
    for key in keys:
        _check_key(key)
