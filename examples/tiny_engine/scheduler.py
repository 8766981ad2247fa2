"""The engine's scheduler: it chooses requests, assigns device blocks, and plans stores and loads.

It holds no KV data. It looks keys up in the manager and sends the worker one message per step.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection

from model import BLOCK_TOKENS, GROUPS, WINDOWS, EngineConfig, prefix_hashes
from worker import Answer, Step

from kvcache import CPULoadStoreSpec, GPULoadStoreSpec, ReqContext, TransferResult, make_offload_key, make_spec

NUM_GROUPS = len(GROUPS)


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass
class Request:
    """Tokens to be computed: a prompt, and `num_output` blocks that come one per step."""

    req_id: int
    tokens: list[int]
    num_output: int
    state: State = State.WAITING
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_GROUPS)])
    num_computed: int = 0
    num_offered: int = 0
    begins: list[int] = field(default_factory=lambda: [0] * NUM_GROUPS)
    """The first device block of each group that has content: a load leaves out what a window has left."""
    stores: set[int] = field(default_factory=set)
    context: ReqContext = field(default_factory=ReqContext)

    @property
    def num_prompt(self) -> int:
        """Full device blocks of the known tokens."""
        return len(self.tokens) // BLOCK_TOKENS


@dataclass
class Job:
    """A transfer in flight; a load makes the request's first `num_blocks` blocks, from `begins` on, computed."""

    request: Request
    keys: list[bytes]
    num_blocks: int = 0
    begins: list[int] = field(default_factory=list)


class Scheduler:
    """Runs requests to their ends.

    Parameters
    ----------
    pipe : Connection
        To the worker.
    config : EngineConfig
        As the worker has it.
    """

    def __init__(self, pipe: Connection, config: EngineConfig) -> None:
        self._pipe = pipe
        spec = make_spec(config.offloading)
        self.manager = spec.get_manager()
        self._factor = spec.block_size_factor
        self._free = list(range(config.num_device_blocks))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loads: dict[int, Job] = {}
        self._stores: dict[int, Job] = {}
        self._next_job = 0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)
        self.manager.on_new_request(request.context)

    @property
    def has_work(self) -> bool:
        """Whether any request or transfer is not at its end."""
        return bool(self._waiting or self._running or self._loads or self._stores)

    def step(self) -> None:
        """Send the worker this step's work and process its answer."""
        step = Step()
        self._admit(step)
        for request in list(self._running):
            if request.state is State.RUNNING:
                self._run(request, step)
        for request in self._running:
            self._offer(request, step)
        self._running = [request for request in self._running if not self._end(request)]
        self.manager.on_schedule_end()
        self._pipe.send(step)
        answer: Answer = self._pipe.recv()
        self.faults += answer.faults
        for result in answer.finished:
            self._take(result)
        self.counts["steps"] += 1

    def _admit(self, step: Step) -> None:
        while self._waiting:
            request = self._waiting[0]
            request.hashes = prefix_hashes(request.tokens, request.hashes)
            need = request.num_prompt * NUM_GROUPS
            if need > len(self._free):
                return
            self._waiting.popleft()
            for blocks in request.blocks:
                blocks += [self._free.pop() for _ in range(request.num_prompt)]
            self._load(request, step)

    def _load(self, request: Request, step: Step) -> None:
        """Look up the longest prefix of which full attention has all blocks, and each window its last ones."""
        keys = [self._keys(request, group, 0, request.num_prompt // self._factor) for group in range(NUM_GROUPS)]
        hits = self.manager.lookup(keys[0], request.context) or 0
        while hits and not all(self._has_window(request, group_keys, hits) for group_keys in keys[1:]):
            hits -= 1
        if not hits:
            request.state = State.RUNNING
            self._running.append(request)
            return
        begins = [0 if window is None else max(hits - window, 0) for window in WINDOWS]
        wanted = [key for group_keys, begin in zip(keys, begins, strict=True) for key in group_keys[begin:hits]]
        source = self.manager.prepare_load(wanted, request.context)
        num_blocks, begins = hits * self._factor, [begin * self._factor for begin in begins]
        device_ids = [
            block for blocks, begin in zip(request.blocks, begins, strict=True) for block in blocks[begin:num_blocks]
        ]
        target = GPULoadStoreSpec(device_ids, [num_blocks - begin for begin in begins], begins)
        request.state = State.LOADING
        request.num_offered = hits
        step.loads.append((self._new_job(self._loads, Job(request, wanted, num_blocks, begins)), (source, target)))
        self.counts["loads"] += 1

    def _has_window(self, request: Request, keys: list[bytes], hits: int) -> bool:
        last = keys[max(hits - WINDOWS[1], 0) : hits]
        return self.manager.lookup(last, request.context) == len(last)

    def _run(self, request: Request, step: Step) -> None:
        """Compute the missing known tokens, or one more block."""
        if request.num_computed == request.num_prompt:
            if not self._grow(request, step):
                return
            first = len(request.tokens)
            request.tokens += [hash((request.req_id, first + i)) % 50_000 for i in range(BLOCK_TOKENS)]
            request.hashes = prefix_hashes(request.tokens, request.hashes)
            request.num_output -= 1
        for group, blocks in enumerate(request.blocks):
            known = list(zip(blocks, request.hashes, strict=True))
            step.compute += [(group, block, name) for block, name in known[request.num_computed :]]
            step.verify += [(group, block, name) for block, name in known[request.begins[group] :]]
        self.counts["computed blocks"] += (request.num_prompt - request.num_computed) * NUM_GROUPS
        request.num_computed = request.num_prompt

    def _grow(self, request: Request, step: Step) -> bool:
        while len(self._free) < NUM_GROUPS:
            victim = next(r for r in reversed(self._running) if r.state is State.RUNNING)
            self._preempt(victim, step)
            if victim is request:
                return False
        for blocks in request.blocks:
            blocks.append(self._free.pop())
        return True

    def _preempt(self, victim: Request, step: Step) -> None:
        """Take a request's blocks; the worker waits for the stores that still read them."""
        # Drop the victim's work of this step: its blocks may belong to another request by then.
        gone = {block for blocks in victim.blocks for block in blocks}
        step.compute = [block for block in step.compute if block[1] not in gone]
        step.verify = [block for block in step.verify if block[1] not in gone]
        step.wait += victim.stores
        self._running = [request for request in self._running if request is not victim]
        self._release(victim)
        victim.state = State.WAITING
        victim.num_computed = victim.num_offered = 0
        victim.begins = [0] * NUM_GROUPS
        self._waiting.appendleft(victim)
        self.counts["preemptions"] += 1

    def _offer(self, request: Request, step: Step) -> None:
        """Offload the blocks that are full since the last time, of a window only those that it has not left."""
        full = request.num_computed // self._factor
        if full == request.num_offered:
            return
        firsts = [max(request.num_offered, full - window if window else 0) for window in WINDOWS]
        keys = [self._keys(request, group, first, full) for group, first in enumerate(firsts)]
        offered = [key for group_keys in keys for key in group_keys]
        request.num_offered = full
        output = self.manager.prepare_store(offered, request.context)
        if output is None:
            self.counts["rejected stores"] += 1
            return
        if not output.keys_to_store:
            return
        # Blocks that are stored already split a group into stretches; each stretch is a job.
        places = {key: (group, firsts[group] + i) for group, names in enumerate(keys) for i, key in enumerate(names)}
        slots = dict(zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True))
        for stretch in _stretches(output.keys_to_store, places):
            group, start = places[stretch[0]]
            blocks = request.blocks[group][start * self._factor : (start + len(stretch)) * self._factor]
            sizes, indices = [0] * NUM_GROUPS, [0] * NUM_GROUPS
            sizes[group], indices[group] = len(blocks), start * self._factor
            job_id = self._new_job(self._stores, Job(request, stretch))
            request.stores.add(job_id)
            target = CPULoadStoreSpec([slots[key] for key in stretch])
            step.stores.append((job_id, (GPULoadStoreSpec(blocks, sizes, indices), target)))
            self.counts["stores"] += 1

    def _end(self, request: Request) -> bool:
        if request.num_output or request.num_computed < request.num_prompt:
            return False
        request.state = State.ENDED
        self.manager.on_request_finished(request.context)
        self.counts["requests"] += 1
        if not request.stores:
            self._release(request)
        return True

    def _take(self, result: TransferResult) -> None:
        kind = "load" if result.job_id in self._loads else "store"
        job = (self._loads if kind == "load" else self._stores).pop(result.job_id)
        request = job.request
        if not result.success:
            self.counts[f"failed {kind}s"] += 1
        if kind == "store":
            self.manager.complete_store(job.keys, request.context, success=result.success)
            request.stores.discard(result.job_id)
            if request.state is State.ENDED and not request.stores:
                self._release(request)
            return
        self.manager.complete_load(job.keys, request.context)
        # After a failed load the blocks hold unknown bytes and are computed again.
        request.num_computed = job.num_blocks if result.success else 0
        request.begins = job.begins if result.success else [0] * NUM_GROUPS
        request.state = State.RUNNING
        self._running.append(request)
        self.counts["loaded blocks"] += len(job.keys) * self._factor * result.success

    def _release(self, request: Request) -> None:
        for blocks in request.blocks:
            self._free += blocks
            blocks.clear()
        request.stores = set()

    def _keys(self, request: Request, group: int, first: int, end: int) -> list[bytes]:
        names = request.hashes[(first + 1) * self._factor - 1 : end * self._factor : self._factor]
        return [make_offload_key(name, group) for name in names]

    def _new_job(self, jobs: dict[int, Job], job: Job) -> int:
        self._next_job += 1
        jobs[self._next_job] = job
        return self._next_job


def _stretches(keys: list[bytes], places: dict[bytes, tuple[int, int]]) -> list[list[bytes]]:
    """Split keys where the next one is not the next block of the same group."""
    found = [[keys[0]]]
    for before, key in pairwise(keys):
        group, index = places[before]
        if places[key] == (group, index + 1):
            found[-1].append(key)
        else:
            found.append([key])
    return found
