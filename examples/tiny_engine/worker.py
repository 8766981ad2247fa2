"""The engine's worker: a process of its own, with the KV cache, the host pool and the copies.

It knows job ids and specs, and does one message of the scheduler per step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from model import EngineConfig, Model, make_kv_caches

from kvcache import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingWorker,
    TransferResult,
    make_spec,
)

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
Transfer = tuple[int, TransferSpec]
Block = tuple[int, int, bytes]
"""Group, device block, hash of the prefix up to its end."""


@dataclass
class Step:
    """What the scheduler asks for, in this order."""

    wait: list[int] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    compute: list[Block] = field(default_factory=list)
    verify: list[Block] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)


@dataclass
class Answer:
    """The worker's answer to a step."""

    finished: list[TransferResult]
    faults: list[str]


class UnreliableHandler(OffloadingHandler):
    """Forwards jobs, reports their ends some steps late, and fails some without moving a byte.

    Parameters
    ----------
    handler : OffloadingHandler
        Does the work.
    failure_rate : float
        Share of the jobs that fail.
    rng : random.Random
        Decides which.
    """

    def __init__(self, handler: OffloadingHandler, failure_rate: float, rng: random.Random) -> None:
        self._handler = handler
        self._failure_rate = failure_rate
        self._rng = rng
        self._failing: set[int] = set()
        self._late: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self._rng.random() < self._failure_rate:
            self._failing.add(job_id)
            spec = tuple(_without_blocks(side) for side in spec)
        return self._handler.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        for result in self._handler.get_finished():
            failed = result.job_id in self._failing
            self._failing.discard(result.job_id)
            self._late.append(replace(result, success=False, transfer_size=0) if failed else result)
        told = self._rng.randint(0, len(self._late))
        results, self._late = self._late[:told], self._late[told:]
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        self._handler.wait(job_ids)

    def shutdown(self, wait: bool = True) -> None:
        self._handler.shutdown(wait)


def _without_blocks(spec: LoadStoreSpec) -> LoadStoreSpec:
    if isinstance(spec, GPULoadStoreSpec):
        return GPULoadStoreSpec([], [0] * len(spec.group_sizes), [0] * len(spec.group_sizes))
    return CPULoadStoreSpec([])


def run_worker(
    pipe: Connection, config: EngineConfig, failure_rate: float, seed: int, corrupt_store: int | None
) -> None:
    """Do steps until None comes.

    Parameters
    ----------
    pipe : Connection
        Steps come in, answers go out.
    config : EngineConfig
        As the scheduler has it.
    failure_rate : float
        Share of the transfers that are made to fail.
    seed : int
        Decides which transfers fail, and how late each end is reported.
    corrupt_store : int, optional
        Number of stores after which one byte of the pool is changed, to test the detection.
    """
    rng = random.Random(seed)
    kv_caches = make_kv_caches(config)
    model = Model(kv_caches)
    spec = make_spec(config.offloading)
    worker = OffloadingWorker()
    for src_type, dst_type, handler in spec.get_handlers(kv_caches):
        worker.register_handler(src_type, dst_type, UnreliableHandler(handler, failure_rate, rng))
    num_stores = 0
    while (step := pipe.recv()) is not None:
        # Blocks that a store still reads were given to another request: nothing may be written before it has ended.
        worker.wait(step.wait)
        for job_id, transfer in step.loads:
            worker.transfer_async(job_id, transfer)
        for block in step.compute:
            model.compute(*block)
        faults = [fault for block in step.verify if (fault := model.fault_in(*block))]
        for job_id, transfer in step.stores:
            worker.transfer_async(job_id, transfer)
            num_stores += 1
            if num_stores == corrupt_store:
                worker.wait([job_id])
                spec.pool.block(int(transfer[1].block_ids[0]))[0] ^= 1
        pipe.send(Answer(worker.get_finished(), faults))
    worker.shutdown()
