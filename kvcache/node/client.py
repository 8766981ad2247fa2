"""An engine's part of a node's pool: the manager's calls, sent to the owner.

A look-up asks for a whole prompt at once, and holds the blocks found, so loads need no message. Messages without an
answer wait for the next one with an answer, or for the end of the step. If the owner does not answer in time, the call
that waited for it and all later ones miss, until the answer has arrived. Copies under way use the mapped memory.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from kvcache.background import Background, after_fork
from kvcache.block import ABSENT, ASK_AGAIN, READY
from kvcache.control.manager import Keys, OffloadingManager
from kvcache.epoch import Epoch, without_weights
from kvcache.hints import actions_of
from kvcache.keys import as_key_list
from kvcache.metrics import ManagerStats, NodeStats, Part
from kvcache.node import protocol
from kvcache.node.batch import LastLookUp, pack_keys
from kvcache.node.link import ANSWER_S, Link, connect
from kvcache.node.prompt import Phase, Prompt
from kvcache.request import ReqContext, RequestAges, RequestOffloadingContext
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput
from kvcache.transfer.shared_file import SharedBlocks

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.02
_IDLE_S = 1.0
"""How often an engine without requests looks for the next owner, which keeps the engine's slots reserved until then."""


class MappedPool(SharedBlocks):
    """The memory of a node's pool, in a worker. It outlives the owner process."""

    def has_owner(self) -> bool:
        return True


def register_worker(folder: Path, hello: Mapping[str, Any], num_blocks: int, block_bytes: int) -> MappedPool:
    """Register a worker process of an engine, and map the pool. The worker may not copy a block before.

    `hello`: from `greeting`, with the worker's rank. ValueError: the pool refuses the engine.
    """
    link = Link(folder, dict(hello))
    answer = connect(link)
    link.close()
    # To map a file that is missing would make another one.
    path = folder / "pool"
    if not path.exists() or path.stat().st_ino != answer["inode"]:
        raise ValueError(f"{path} was removed while its owner, process {answer['pid']}, runs: end the owner first")
    return MappedPool(path, num_blocks, block_bytes, is_owner=False)


def greeting(
    engine: str, identity: Mapping[str, Any], options: Mapping[str, Any], rank: int = -1, num_workers: int = 0
) -> dict[str, Any]:
    """Return the greeting of a client of the engine whose id is `engine`.

    `rank` is that of a worker, or -1 for the scheduler, which is refused until `num_workers` workers have joined. With
    the same `identity`, blocks of engines are exchangeable; it has ``num_blocks``, ``block_bytes`` and ``block_size``.
    Engines of other ``weights`` may join the pool, but share no block. `options` are the owner's.
    """
    epoch = Epoch.of(identity)
    return {
        "version": protocol.VERSION, "engine": engine, "identity": without_weights(identity), "options": dict(options),
        "rank": rank, "num_workers": num_workers, "epoch": epoch.digest().hex() if epoch.weights else "",
    }  # fmt: skip


class NodeManager(LastLookUp, OffloadingManager):
    """A scheduler's manager over the pool in a folder, with `hello` from `greeting`.

    If the model has several KV-cache groups, a look-up holds all ready blocks of a prompt. If their windows are in the
    greeting, `prepare_load` releases those that it does not name. A call waits for the owner for `patience_s`. With
    `starts_owner`, an owner is started if none serves the folder. `lookup`, `prepare_load` and `prepare_store` raise
    ValueError without a request. Keys have one length of at most 36 bytes; others are not stored.
    ValueError: the pool refuses this engine, and the message names each difference.
    """

    medium = CPULoadStoreSpec.medium()
    events = None

    def __init__(
        self, folder: Path, hello: dict[str, Any], *, num_groups: int = 1, starts_owner: bool = True,
        patience_s: float = ANSWER_S,
    ) -> None:  # fmt: skip
        self._link = Link(folder, hello, starts_owner, patience_s)
        self._is_hybrid = num_groups > 1
        self.asks_tiers = num_groups > 1 and bool(hello["options"].get("tiers"))
        windows = hello["identity"].get("group_windows")
        self.path_group: int | None = None if windows is None else windows.index(None)
        self.block_size = int(hello["identity"]["block_size"])
        # A store of more blocks is always refused, so adapters offer the head that fits.
        self.num_blocks = protocol.most_held(int(hello["identity"]["num_blocks"]))
        self._prompts: dict[ReqContext, Prompt] = {}
        # Prompts that were opened before a reset, with their requests; their copies may still run.
        self._stale: list[tuple[ReqContext, Prompt]] = []
        self._last_number = 1
        self._counts = Counter[str]()
        # Requests that were open at a reset store nothing. The owner cannot track them: it sees only keys of an epoch.
        self.ages = RequestAges()
        self.refusal = ""
        # The messages of a forked child would mix with those of its parent.
        after_fork(self, NodeManager._leave)
        answer = connect(self._link)
        self.number: int = answer["number"]
        self.found: list[str] = answer["found"]
        # Held while the last request ends, or none is open: then the thread may use the connection.
        self._lock = RLock()
        self._idle = Background.every(_IDLE_S, "node-idle", self._step_if_idle)

    @property
    def pool(self) -> NodeManager:
        """The manager itself, as adapters read a pool."""
        return self

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.ages.open(req_context)
        return super().on_new_request(req_context)

    def acquire(self, key: bytes, req_context: ReqContext, keys: Collection[bytes] = ()) -> int:
        """Return the state of a key that the last look-up does not hold; ask the owner if its last answer lacks it."""
        if self._stale and any(stale.num_loads and old is req_context for old, stale in self._stale):
            # With two loads of one request, it would be unclear which of them ends.
            return ABSENT
        prompt = self._prompts.get(req_context) or self._open(req_context)
        state = prompt.status(key)
        if state is None:
            state = prompt.acquire(self._link, key, req_context.positions or keys)
            # The compiled `status` then answers for these blocks without a call of Python.
            self.remember(req_context, prompt.held if prompt.phase is Phase.ANSWERED else None)
        return state

    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int | None:
        self._prompt(req_context)
        assert req_context is not None
        key_list, num_ready = [keys] if isinstance(keys, bytes) else as_key_list(keys), 0
        for key in key_list:
            state = self.acquire(key, req_context, key_list)
            if state == ASK_AGAIN:
                return None
            if state != READY:
                break
            num_ready += 1
        return num_ready == 1 if isinstance(keys, bytes) else num_ready

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> CPULoadStoreSpec:
        prompt, keys = self._prompt(req_context), as_key_list(keys)
        spec = prompt.held.load_spec(keys)
        # A second load at the same time releases nothing that the first one reads.
        if self.path_group is not None and req_context is not None and not prompt.num_loads:
            # The owner takes each slot once; a load may name a key twice.
            loaded = dict(zip(keys, spec.block_ids.tolist(), strict=True))
            prompt.use(self._link, req_context.positions, [*loaded], np.array([*loaded.values()], "<i4").tobytes())
        prompt.num_loads += 1
        self._counts["loaded_blocks"] += len(keys)
        self._counts["needed_blocks"] += len(keys)
        return spec

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        prompt = self._prompts.get(req_context) if req_context is not None else None
        if prompt is None or not prompt.num_loads:
            stale = next((stale for old, stale in self._stale if old is req_context and stale.num_loads), None)
            if stale is not None:
                stale.num_loads -= 1
                self._end_stale()
            return
        prompt.num_loads -= 1
        if not prompt.num_loads:
            prompt.release(self._link)
            self._drop_stale()
            self._end_if_done(prompt, req_context)

    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        prompt, keys = self._prompt(req_context), as_key_list(keys)
        if not keys:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if prompt.held.keys and not prompt.num_loads:
            # The request computes its blocks, so it loads no more of them.
            prompt.release(self._link)
        if self.ages.predates(req_context):
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if self.path_group is not None and req_context is not None:
            prompt.use(self._link, req_context.positions, [], b"")
        answer = None
        with suppress(ValueError):
            payload, num_bytes = pack_keys(keys)[1:]
            answer = self._link.ask(protocol.OFFER, 0, prompt.number, payload, num_bytes)
        if answer is None:
            # An outage, not a lack of room.
            return None
        num_missed, *slots = np.frombuffer(answer.payload, "<i4").tolist()
        self._counts["needed_blocks"] += num_missed
        if answer.flag:
            self._counts["rejected_stores"] += 1
            return None
        taken = {key: slot for key, slot in zip(keys, slots, strict=True) if slot >= 0}
        prompt.writing.update(taken)
        return PrepareStoreOutput([*taken], CPULoadStoreSpec([*taken.values()]), [])

    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        keys = list(keys)
        for old, stale in self._stale:
            if old is req_context and (slots := stale.take_written(keys)):
                # An engine may also drop such copies without a report: see `_drop_stale`.
                self._tell_stored(stale, False, slots.values())
                self._end_stale()
                return
        prompt = self._prompts.get(req_context) if isinstance(req_context, ReqContext) else None
        if prompt is None:
            return
        slots = prompt.take_written(keys)
        if slots:
            self._tell_stored(prompt, success, slots.values())
            self._counts["stored_blocks" if success else "failed_blocks"] += len(slots)
            self._drop_stale()
        self._end_if_done(prompt, req_context)

    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        self.ages.close(req_context)
        positions = req_context.positions if use_positions else None
        if positions or req_context in self._prompts:
            prompt = self._prompt(req_context)
            prompt.finish(positions)
            self._end_if_done(prompt, req_context)

    def on_schedule_end(self) -> None:
        with self._lock:
            if not self._link.is_ready:
                self._reconnect()
            self._link.flush()

    def _step_if_idle(self) -> None:
        with self._lock:
            if not (self._prompts or self.refusal):
                self._link.check()
                if not self._link.is_ready:
                    self._reconnect(starts_owner=False)
                self._link.flush()

    def reset_cache(self, version: str | int | None = None) -> None:
        """Begin the epoch of `version`, or a private one. Blocks of the old epoch stay in the pool for other engines.

        Slots of this engine's running copies are returned when the engine reports their end, or after the first copy
        that begins later: workers finish the older ones before it. While the owner cannot be reached, look-ups miss.
        """
        epoch = Epoch.after_reset(self.version_of_reset(version)).digest()
        self.ages.num_resets += 1
        with self._lock:
            for req_context, prompt in list(self._prompts.items()):
                if prompt.num_loads or prompt.writing:
                    self._stale.append((req_context, prompt))
                    del self._prompts[req_context]
                else:
                    prompt.release(self._link)
            self.remember(None, None)
            # If the connection is lost, the next greeting names the new epoch.
            self._link.hello["epoch"] = epoch.hex()
            if self._link.ask(protocol.RESET, 0, 0, epoch) is None:
                # The owner may not have received the reset, and would find old blocks. A new greeting repeats it.
                self._link.hello["is_reset"] = True
                self._link.close()
            self._send_prompts_again()

    def reorder(self, req_context: ReqContext) -> None:
        """Done by the owner with each store."""

    def note_found(self, req_context: ReqContext, end_token: int) -> None:
        """Record where the leading run of blocks without a window ends that memory and tiers hold."""
        prompt = self._prompt(req_context)
        prompt.found_tokens = max(prompt.found_tokens, end_token)

    def states(self, keys: Collection[bytes]) -> bytes:
        """Return 0 for each key: the states of blocks are the owner's."""
        return bytes(len(keys))

    def stats(self) -> ManagerStats:
        """Return what this engine loaded and stored; the pool's own figures are the owner's."""
        return ManagerStats(**self._counts)

    def parts(self) -> list[Part]:
        reason = self.refusal or ("" if self._link.has_answered else "the owner does not answer")
        return [Part("", self.stats()), Part("node", NodeStats(unavailable=reason, **self._link.counts))]

    def owner_figures(self) -> dict[str, Any] | None:
        """Return the owner's counters, or None if it does not answer."""
        with self._lock:
            answer = self._link.ask(protocol.STATS, 0, 0)
        return None if answer is None else json.loads(answer.payload)

    def shutdown(self) -> None:
        self._idle.stop()
        self.on_schedule_end()
        self._leave()
        super().shutdown()

    def _leave(self) -> None:
        # In a forked child, a thread of the parent may have had the lock.
        self._lock = RLock()
        self._link.close()
        self.refusal = "shut down, or in a forked process"

    def _prompt(self, req_context: ReqContext | None) -> Prompt:
        if not isinstance(req_context, ReqContext):
            raise ValueError(f"a call of a node's pool needs its request, got {req_context!r}")
        prompt = self._prompts.get(req_context) or self._open(req_context)
        if prompt.phase is Phase.ENDED:
            # A call after the end, while a store runs: the owner, which has forgotten the request, gets its end again.
            prompt.phase = Phase.FINISHED
        return prompt

    def _open(self, req_context: ReqContext) -> Prompt:
        self.ages.open(req_context)
        self._last_number = self._last_number % 0x7FFFFFFF + 1
        with self._lock:
            prompt = self._prompts[req_context] = Prompt(self._last_number, self._is_hybrid, self.asks_tiers)
        # A key has more than the hash of its block here, so the owner rejects hashes.
        if actions := [action._replace(hashes=action.hashes and []) for action in actions_of(req_context)]:
            self._link.tell(protocol.OPEN, 0, prompt.number, json.dumps(actions).encode())
        return prompt

    def _end_if_done(self, prompt: Prompt, req_context: Any) -> None:
        if prompt.end_if_done(self._link):
            with self._lock:
                self._prompts.pop(req_context, None)
                if not self._prompts:
                    # An engine that becomes idle makes no later call, and other engines wait for its last blocks.
                    self._link.flush()

    def _drop_stale(self) -> None:
        """Return the slots of copies from before a reset: a later copy has ended."""
        for _, prompt in self._stale:
            if slots := prompt.take_written(list(prompt.writing)):
                self._tell_stored(prompt, False, slots.values())
            prompt.num_loads = 0
        self._end_stale()

    def _end_stale(self) -> None:
        """Return the slots of prompts from before a reset whose copies have all ended."""
        for _, prompt in self._stale:
            if not (prompt.num_loads or prompt.writing):
                self._link.tell(protocol.END, 0, prompt.number)
        self._stale = [(old, prompt) for old, prompt in self._stale if prompt.num_loads or prompt.writing]

    def _tell_stored(self, prompt: Prompt, success: bool, slots: Collection[int]) -> None:
        payload = np.array([len(slots), *slots], "<i4").tobytes()
        self._link.tell(protocol.STORED, int(success), prompt.number, payload)

    def _leases(self) -> list[tuple[int, list[int], list[int]]]:
        prompts = [*self._prompts.values(), *(prompt for _, prompt in self._stale)]
        leases = [(prompt.number, prompt.held.slots, list(prompt.writing.values())) for prompt in prompts]
        return [lease for lease in leases if lease[1] or lease[2]]

    def _reconnect(self, starts_owner: bool = True) -> None:
        """Try to come back to an owner, without waiting for it."""
        now_s = time.monotonic()
        if self.refusal or now_s < self._link.retry_s:
            return
        self._link.retry_s = now_s + _RETRY_S
        frame = self._link.meet(self._leases(), starts_owner=starts_owner)
        if frame is None:
            return
        if not self._link.is_ready:
            self.refusal = frame.payload.decode()
            _LOG.error("the pool of this node refuses this engine, which goes on without: %s", self.refusal)
            return
        self._link.hello["is_reset"] = False
        self._send_prompts_again()

    def _send_prompts_again(self) -> None:
        for prompt in self._prompts.values():
            # The owner knows the leases of each request, but no prompt any more.
            prompt.keys, prompt.places = [], None
            if not prompt.held.keys:
                prompt.forget()
