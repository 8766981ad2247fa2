"""An engine's part of a node's pool: the manager's calls, sent to the owner.

A look-up asks for a whole prompt at once and holds what it finds, so loads need no message. Messages without an answer
wait for the next one with an answer, or for the end of the step. If the owner does not answer in time, the call that
waited for it and all later ones miss, until the owner answers again: copies under way end on the mapped memory.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.background import after_fork
from kvcache.block import ABSENT, ASK_AGAIN, PENDING, READY
from kvcache.control.manager import Keys, OffloadingManager
from kvcache.keys import as_key_list
from kvcache.metrics import ManagerStats, NodeStats, Part
from kvcache.node import protocol
from kvcache.node.batch import HeldBlocks, LastLookUp, pack_keys
from kvcache.node.protocol import MULTI, Frame, FrameReader, pack
from kvcache.request import HintReader, ReqContext
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput
from kvcache.transfer.shared_file import SharedBlocks

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 600.0
"""How long an engine waits at its start, while the owner allocates the memory."""
_SPAWN_TIMEOUT_S = 30.0
_SEND_S, _ANSWER_S = 0.01, 0.035
_RETRY_S, _RESTART_S = 0.02, 2.0
_MAX_PENDING_S = 1.0
"""How long a request waits for a block that another one is writing."""


class MappedPool(SharedBlocks):
    """The memory of a node's pool, in a worker."""

    def has_owner(self) -> bool:
        # The memory outlives the owner process, and the worker is one of the processes that the owner watches.
        return True


class _View:
    """One request: its prompt's keys, and what the owner holds for it."""

    __slots__ = (
        *("end", "end_positions", "first", "has_ended", "held", "is_fresh", "keys", "num_loads", "number", "places"),
        *("since_s", "state", "writing"),
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.keys: list[bytes] = []
        self.places: dict[bytes, int] | None = None
        self.held = HeldBlocks()
        self.writing: dict[bytes, int] = {}
        # The key that the last look-up began with, the first one that it did not find, and that one's state.
        self.first: bytes | None = None
        self.end: bytes | None = None
        self.state: int = ABSENT
        # Whether `state` was asked for by a look-up that has not reached `end` yet.
        self.is_fresh = False
        self.since_s = 0.0
        self.num_loads = 0
        # The prompt's keys with their end positions, once the request has ended; then whether the owner knows.
        self.end_positions: dict[bytes, int] | None = None
        self.has_ended = False

    def forget_look_up(self) -> None:
        """Ask the owner again at the next look-up."""
        self.held.clear()
        self.first, self.end, self.state, self.since_s = None, None, ABSENT, 0.0


class Link:
    """A connection to the owner of a folder's pool. `hello` identifies the client.

    A call waits at most `patience_s` for the owner, and then the connection is closed. With `starts_owner`, a missing
    owner is started.
    """

    def __init__(
        self, folder: Path, hello: dict[str, Any], starts_owner: bool = True, patience_s: float = _ANSWER_S
    ) -> None:
        self.folder, self.hello, self.starts_owner = folder, hello, starts_owner
        self._patience_s = patience_s
        self._sock: socket.socket | None = None
        self._reader = FrameReader()
        self.is_ready = False
        # When to greet an owner again, and when to start one again.
        self.retry_s = self._restart_s = 0.0

    def greet(self, leases: list[tuple[int, list[int], list[int]]]) -> None:
        """Connect and send the greeting. OSError: no owner listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        pidfd = os.pidfd_open(os.getpid())
        try:
            sock.setblocking(False)
            sock.connect(str(self.folder / "socket"))
            payload = json.dumps({**self.hello, "leases": leases}).encode()
            sock.setblocking(True)
            for option, seconds in ((socket.SO_SNDTIMEO, _SEND_S), (socket.SO_RCVTIMEO, self._patience_s)):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
            frame = pack(protocol.HELLO, 0, 0, payload)
            sent = socket.send_fds(sock, [frame], [pidfd])
            sock.sendall(frame[sent:])
        except OSError:
            sock.close()
            raise
        finally:
            os.close(pidfd)
        self._sock, self._reader = sock, FrameReader()

    def meet(self, leases: list[tuple[int, list[int], list[int]]], timeout_s: float = 0.0) -> Frame | None:
        """Greet the owner if that is not done, and return its answer, or None if it has not arrived.

        If no owner listens, one is started, unless another was started a moment before.
        """
        try:
            if not self.is_open:
                self.greet(leases)
            frame = self.receive(timeout_s)
        except OSError as error:
            self.close()
            is_gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            if is_gone and self.starts_owner and time.monotonic() >= self._restart_s:
                self._restart_s = time.monotonic() + _RESTART_S
                spawn_owner(self.folder)
            return None
        self.is_ready = frame is not None and frame.op != protocol.REFUSED
        if frame is not None and not self.is_ready:
            self.close()
        return frame

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, greeted or not."""
        return self._sock is not None

    def receive(self, timeout_s: float = 0.0) -> Frame | None:
        """Return the next frame, or None if it has not arrived. OSError: the owner has ended."""
        assert self._sock is not None
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                data = self._sock.recv(1 << 16, 0 if timeout_s else socket.MSG_DONTWAIT)
                for frame in self._reader.feed(data):
                    return frame
                if not data:
                    raise ConnectionResetError("the owner has ended")
            except BlockingIOError:
                pass
            if time.monotonic() >= end_s:
                return None

    def send(self, data: bytes) -> None:
        """Send frames. OSError: the owner does not take them."""
        assert self._sock is not None
        self._sock.sendall(data)

    def ask(self, data: bytes) -> Frame:
        """Send frames of which the last has an answer, and return it. OSError: it did not come in time."""
        self.send(data)
        frame = self.receive(self._patience_s)
        if frame is None:
            raise TimeoutError("the owner takes too long")
        return frame

    def close(self) -> None:
        """Close the connection; the owner keeps the leases."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self.is_ready = None, False


def spawn_owner(folder: Path) -> None:
    """Start an owner process that outlives this one, unless one serves the folder already; does not wait for it."""
    # Two forks: engines end all of their children. The owner finds the modules that this process finds.
    code = "import os, sys\nif os.fork(): os._exit(0)\nfrom kvcache.node.owner import main\nsys.exit(main(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # -P: no module is taken from the working directory, which may be open to others.
    words = [sys.executable, "-P", "-c", code, str(folder)]
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    # An engine's step must not wait for the interpreter to start.
    threading.Thread(target=child.wait, daemon=True).start()


def connect(link: Link) -> dict[str, Any]:
    """Greet the owner; return its answer. ValueError: the engine is refused."""
    end_s = time.monotonic() + _SPAWN_TIMEOUT_S
    fd = os.open(link.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Under the lock the owner does not end, and no two engines start one.
        fcntl.flock(fd, fcntl.LOCK_EX)
        while time.monotonic() < end_s:
            frame = link.meet([], _START_TIMEOUT_S)
            if frame is None:
                # An owner that is ending may still have the folder's lock.
                time.sleep(0.01)
                continue
            if not link.is_ready:
                raise ValueError(f"the pool of this node in {link.folder} refuses the engine: {frame.payload.decode()}")
            answer: dict[str, Any] = json.loads(frame.payload)
            link.hello["pool_id"] = answer["pool_id"]
            return answer
    finally:
        os.close(fd)
    link.close()
    raise ValueError(f"no owner of the pool in {link.folder} answers; see {link.folder / 'log'}")


def register_worker(folder: Path, hello: Mapping[str, Any], num_blocks: int, block_bytes: int) -> MappedPool:
    """Register a worker process of an engine, and map the pool. Before: no copy of it may begin.

    `hello` is as of `NodeManager`, with the worker's ``rank``. ValueError: the pool refuses the engine.
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
    """Return the identity of a client, for its greeting.

    `engine` is the id of the engine, `identity` what makes its blocks different from others (with ``num_blocks``,
    ``block_bytes`` and ``block_size``), `options` those of the owner, `rank` the worker's, -1 for a scheduler, and
    `num_workers` the number of workers that must have been registered before the scheduler.
    """
    return {
        "version": protocol.VERSION, "engine": engine, "identity": dict(identity), "options": dict(options),
        "rank": rank, "num_workers": num_workers,
    }  # fmt: skip


class NodeManager(LastLookUp, OffloadingManager):
    """A scheduler's manager over the pool of its node.

    Parameters
    ----------
    folder : Path
        The pool's folder, see `kvcache.node.protocol.node_folder`.
    hello : dict
        From `greeting`.
    num_groups : int
        KV-cache groups of the model. Of several, a look-up holds all ready blocks of a prompt.
    starts_owner : bool
        Whether to start an owner if none serves the folder.
    patience_s : float
        How long a call waits for the owner.

    Raises
    ------
    ValueError
        The pool refuses this engine; the message names each difference.

    Notes
    -----
    `lookup`, `prepare_load` and `prepare_store` without a request raise ValueError. Keys have one length of at most 36
    bytes; others are never stored.
    """

    medium = CPULoadStoreSpec.medium()
    events = None

    def __init__(
        self,
        folder: Path,
        hello: dict[str, Any],
        *,
        num_groups: int = 1,
        starts_owner: bool = True,
        patience_s: float = _ANSWER_S,
    ) -> None:
        self._link = Link(folder, hello, starts_owner, patience_s)
        self._multi = MULTI if num_groups > 1 else 0
        self._asks_tiers = num_groups > 1 and bool(hello["options"].get("tiers"))
        self.block_size = int(hello["identity"]["block_size"])
        self.num_blocks = int(hello["identity"]["num_blocks"])
        self._views: dict[ReqContext, _View] = {}
        self._stale: list[_View] = []
        self._unsent: list[bytes] = []
        self._last_number = 1
        self._counts = dict.fromkeys((*_MANAGER_COUNTS, *_NODE_COUNTS), 0)
        self._hints = HintReader()
        self._due_reset: list[str | int | None] = []
        self.refusal = ""
        # Its messages would mix with those of its parent.
        after_fork(self, NodeManager._leave)
        self.number: int = connect(self._link)["number"]

    @property
    def pool(self) -> NodeManager:
        """The manager itself, as adapters read a pool."""
        return self

    def look_up(self, key: bytes, req_context: ReqContext) -> int:
        """Return the state of a key that the last look-up does not hold."""
        return self._status(self._views.get(req_context) or self._open(req_context), key, req_context)

    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int | None:
        view = self._view(req_context)
        assert req_context is not None
        is_one = isinstance(keys, bytes)
        keys = [keys] if is_one else as_key_list(keys)
        num_ready = 0
        for key in keys:
            state = self._status(view, key, req_context, keys)
            if state != READY:
                if state == ASK_AGAIN:
                    return None
                break
            num_ready += 1
        return num_ready == 1 if is_one else num_ready

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> CPULoadStoreSpec:
        view, keys = self._view(req_context), as_key_list(keys)
        spec = view.held.load_spec(keys)
        view.num_loads += 1
        self._counts["loaded_blocks"] += len(keys)
        return spec

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        view = self._views.get(req_context) if req_context is not None else None
        if view is None or not view.num_loads:
            return
        view.num_loads -= 1
        if not view.num_loads:
            self._release(view)
            self._drop_stale()
            self._end_if_done(view, req_context)

    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        view, keys = self._view(req_context), as_key_list(keys)
        if not keys:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if view.held.keys and not view.num_loads:
            # The request computes its blocks, so it loads no more of them.
            self._release(view)
        answer = None
        with suppress(ValueError):
            payload, num_bytes = pack_keys(keys)[1:]
            answer = self._ask(protocol.OFFER, 0, view.number, payload, num_bytes)
        if answer is None or answer.flag:
            self._counts["rejected_stores"] += 1
            return None
        slots = np.frombuffer(answer.payload, "<i4").tolist()
        taken = {key: slot for key, slot in zip(keys, slots, strict=True) if slot >= 0}
        view.writing.update(taken)
        self._counts["missed_blocks"] += len(taken)
        return PrepareStoreOutput([*taken], CPULoadStoreSpec([*taken.values()]), [])

    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        view = self._views.get(req_context) if isinstance(req_context, ReqContext) else None
        if view is None:
            return
        slots = {key: view.writing.pop(key) for key in keys if key in view.writing}
        if slots:
            self._tell_stored(view.number, success, slots.values())
            self._counts["stored_blocks" if success else "failed_blocks"] += len(slots)
            self._drop_stale()
        self._end_if_done(view, req_context)

    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        view = self._views.get(req_context)
        positions = req_context.positions if use_positions else None
        if view is None:
            if not positions:
                return
            view = self._open(req_context)
        view.end_positions = positions or {}
        self._end_if_done(view, req_context)

    def on_schedule_end(self) -> None:
        if not self._link.is_ready:
            self._reconnect()
        elif self._unsent:
            self._flush(self._link.send)

    def reset_cache(self, version: str | int | None = None) -> None:
        """Empty the pool for all engines of the node.

        Slots of this engine's running copies are returned after the first copy that begins later: workers finish the
        older ones before it. While the owner cannot be reached, every look-up misses.
        """
        for req_context, view in list(self._views.items()):
            if view.num_loads or view.writing:
                self._stale.append(view)
                del self._views[req_context]
            else:
                self._release(view)
        self.remember(None, None)
        self._due_reset = [version]
        self._reset()

    def reorder(self, req_context: ReqContext) -> None:
        """Done by the owner with each store."""

    def states(self, keys: Collection[bytes]) -> bytes:
        """Return 0 for each key: the states of blocks are the owner's."""
        return bytes(len(keys))

    def stats(self) -> ManagerStats:
        """Return what this engine loaded and stored; the pool's own figures are the owner's."""
        counts = {name: self._counts[name] for name in _MANAGER_COUNTS if name != "missed_blocks"}
        return ManagerStats(**counts, needed_blocks=counts["loaded_blocks"] + self._counts["missed_blocks"])

    def parts(self) -> list[Part]:
        reason = self.refusal or ("" if self._link.is_ready else "the owner does not answer")
        counts = {name: self._counts[name] for name in _NODE_COUNTS}
        return [Part("", self.stats()), Part("node", NodeStats(unavailable=reason, **counts))]

    def owner_figures(self) -> dict[str, Any] | None:
        """Return the owner's counters, or None if it does not answer."""
        answer = self._ask(protocol.STATS, 0, 0)
        return None if answer is None else json.loads(answer.payload)

    def shutdown(self) -> None:
        self.on_schedule_end()
        self._leave()
        super().shutdown()

    def _leave(self) -> None:
        self._link.close()
        self.refusal = "shut down, or in a forked process"

    def _view(self, req_context: ReqContext | None) -> _View:
        if not isinstance(req_context, ReqContext):
            raise ValueError(f"a call of a node's pool needs its request, got {req_context!r}")
        return self._views.get(req_context) or self._open(req_context)

    def _open(self, req_context: ReqContext) -> _View:
        self._last_number = self._last_number % 0x7FFFFFFF + 1
        view = self._views[req_context] = _View(self._last_number)
        if req_context.retention is not None or req_context.kv_transfer_params is not None:
            hint = self._hints.of(req_context)
            if hint is not None:
                self._tell(protocol.OPEN, 0, view.number, json.dumps(asdict(hint)).encode())
        return view

    def _new_keys(self, view: _View, keys: Collection[bytes]) -> tuple[bytes, int]:
        """Return the keys of a prompt that the owner does not know yet, packed; the end positions if they are known."""
        num_known = len(view.keys)
        if len(keys) <= num_known:
            return b"", 0
        new, payload, num_bytes = pack_keys(keys, num_known)
        view.keys += new
        view.places = None
        return payload, num_bytes

    def _place(self, view: _View, key: bytes | None) -> int:
        """Return the place of a key in the prompt that the owner knows, or -1."""
        if view.keys and key == view.keys[0]:
            return 0
        if view.places is None:
            view.places = {known: place for place, known in enumerate(view.keys)}
        return -1 if key is None else view.places.get(key, -1)

    def _status(self, view: _View, key: bytes, req_context: ReqContext, keys: Collection[bytes] = ()) -> int:
        """Return the state of a key; ask the owner if a look-up begins with it and it is not known to be held."""
        if key in view.held and (view.state == ABSENT or key != view.first):
            return READY
        if view.first is not None:
            if key == view.end:
                # An engine's later look-ups may begin behind `first`: each asks again for what is being written.
                if view.state == ABSENT or (key != view.first and view.is_fresh):
                    view.is_fresh = False
                    return view.state
            else:
                place = self._place(view, key)
                if key != view.first and place >= 0 and (self._multi or place > self._place(view, view.first)):
                    return self._look_up(view, place) if self._asks_tiers else ABSENT
        self._acquire(view, key, req_context.positions or keys)
        view.is_fresh = key != view.end
        self.remember(req_context, view.held if view.state == ABSENT else None)
        return READY if key in view.held else view.state if key == view.end else ABSENT

    def _acquire(self, view: _View, key: bytes, keys: Collection[bytes]) -> None:
        """Look up a prompt from `key` on, and hold what is ready; of several groups, all that is ready."""
        view.first = view.end = key
        view.state = ABSENT
        try:
            payload, num_bytes = self._new_keys(view, keys)
            if self._place(view, key) < 0 and not payload:
                payload, num_bytes = self._new_keys(view, [*view.keys, key])
        except ValueError:
            return
        start = 0 if self._multi else max(0, self._place(view, key))
        answer = self._ask(protocol.ACQUIRE, self._multi, view.number, struct.pack("<I", start) + payload, num_bytes)
        if answer is not None:
            self._take(view, start, answer)

    def _look_up(self, view: _View, place: int) -> int:
        """Ask the owner for one key of a model with several groups, which a tier may hold."""
        answer = self._ask(protocol.LOOKUP, 0, view.number, struct.pack("<I", place))
        if answer is None:
            return ABSENT
        self._take(view, place, answer)
        state, view.state = view.state, ABSENT
        return READY if view.keys[place] in view.held else state

    def _take(self, view: _View, start: int, answer: Frame) -> None:
        self._counts["shared_hit_blocks"] += struct.unpack_from("<I", answer.payload)[0]
        asked = view.keys[start : start + len(answer.payload) // 4 - 1]
        end = start + len(asked) if view.held.add(asked, answer.payload[4:]) == len(asked) else start
        view.end = next((key for key in islice(view.keys, end, None) if key not in view.held), None)
        view.state = answer.flag
        if view.state == PENDING:
            view.since_s = view.since_s or time.monotonic()
            if time.monotonic() - view.since_s > _MAX_PENDING_S:
                view.state = ABSENT

    def _release(self, view: _View) -> None:
        if view.first is not None:
            self._tell(protocol.RELEASE, 0, view.number)
        view.forget_look_up()

    def _end_if_done(self, view: _View, req_context: Any) -> None:
        """Report the end of a request after its last load, and forget it after its last store."""
        if view.end_positions is None or view.num_loads:
            return
        if not view.has_ended:
            payload, num_bytes = b"", 0
            with suppress(ValueError):
                payload, num_bytes = self._new_keys(view, view.end_positions)
            self._tell(protocol.END, int(bool(view.end_positions)), view.number, payload, num_bytes)
            view.has_ended = True
            view.forget_look_up()
        if not view.writing:
            self._views.pop(req_context, None)

    def _drop_stale(self) -> None:
        """Return the slots of copies from before a reset: a later copy has ended."""
        for view in self._stale:
            if view.writing:
                self._tell_stored(view.number, False, view.writing.values())
            self._tell(protocol.END, 0, view.number)
        self._stale.clear()

    def _tell(self, op: int, flag: int, number: int, payload: bytes = b"", key_bytes: int = 0) -> None:
        """Send later, with the next question or at the end of the step. Without an owner there is nothing to say."""
        if self._link.is_open:
            self._unsent.append(pack(op, flag, number, payload, key_bytes))

    def _tell_stored(self, number: int, success: bool, slots: Collection[int]) -> None:
        self._tell(protocol.STORED, int(success), number, np.array([len(slots), *slots], "<i4").tobytes())

    def _ask(self, op: int, flag: int, number: int, payload: bytes = b"", key_bytes: int = 0) -> Frame | None:
        """Return the owner's answer, or None if it does not answer."""
        if not self._link.is_ready:
            return None
        self._unsent.append(pack(op, flag, number, payload, key_bytes))
        self._counts["round_trips"] += 1
        return self._flush(self._link.ask)

    def _flush(self, send: Callable[[bytes], Frame | None]) -> Frame | None:
        """Send what waits, and return the answer, if `send` waits for one and it comes."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        try:
            return send(data)
        except OSError as error:
            self._lose(error)
            return None

    def _lose(self, error: OSError) -> None:
        """Go on without the owner. The leases stay: the ledger has them."""
        self._counts["outages"] += 1
        self._link.hello["outages"] = self._counts["outages"]
        _LOG.warning("the owner of %s does not answer (%r): look-ups miss until it does", self._link.folder, error)
        self._link.close()

    def _leases(self) -> list[tuple[int, list[int], list[int]]]:
        views: Iterable[_View] = [*self._views.values(), *self._stale]
        leases = [(view.number, view.held.slots, list(view.writing.values())) for view in views]
        return [lease for lease in leases if lease[1] or lease[2]]

    def _reconnect(self) -> None:
        """Try to come back to an owner, without waiting for it."""
        now_s = time.monotonic()
        if self.refusal or now_s < self._link.retry_s:
            return
        self._link.retry_s = now_s + _RETRY_S
        if not self._link.is_open:
            self._unsent.clear()
        frame = self._link.meet(self._leases())
        if frame is None:
            return
        if not self._link.is_ready:
            self.refusal = frame.payload.decode()
            _LOG.error("the pool of this node refuses this engine, which goes on without: %s", self.refusal)
            return
        for view in self._views.values():
            # The owner has a new list of requests, without their prompts.
            view.keys, view.places = [], None
            if not view.held.keys:
                view.forget_look_up()
        self._reset()

    def _reset(self) -> None:
        if self._due_reset and self._ask(protocol.RESET, 0, 0, json.dumps(self._due_reset[0]).encode()):
            self._due_reset = []


_MANAGER_COUNTS = ("loaded_blocks", "stored_blocks", "rejected_stores", "failed_blocks", "missed_blocks")
_NODE_COUNTS = ("round_trips", "outages", "shared_hit_blocks")
