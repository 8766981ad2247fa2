"""Threads that submit, await, cancel and close the same copies, with and without a GIL: every byte arrives once."""

import threading
import time
from functools import partial

import numpy as np

from kvcache.transfer._native.copy import CopyQueue
from kvcache.transfer._native.plan import Geometry


def test_copies_of_many_threads_are_whole(run_threads, budget):
    page_bytes, num_blocks = 4096, 64
    device = np.arange(num_blocks, dtype=np.int64).repeat(page_bytes // 8).reshape(num_blocks, -1)
    host = np.full((num_blocks, page_bytes // 8), -1, np.int64)
    address = [memory.__array_interface__["data"][0] for memory in (device, host)]
    geometry = Geometry([(address[0], num_blocks, page_bytes)], [[(0, page_bytes)]], address[1], page_bytes, num_blocks)
    submitted, finished = [], []
    queue = CopyQueue(geometry, True, 3, 1 << 14)

    def submit(rng, own):
        # Each thread has its own blocks, so no other thread writes the blocks that it reads after its job has ended.
        ids = np.array(rng.sample(own, rng.choice([1, 3, 20])))
        place = queue.submit(len(ids), ids, [len(ids)], [0], ids)
        submitted.append(len(ids))
        if rng.random() < 0.3:
            queue.wait(place)
            np.testing.assert_array_equal(host[ids], device[ids])

    def finish(rng):
        finished.extend(queue.get_finished())
        time.sleep(1e-4)

    halves = [range(first, num_blocks, 2) for first in (0, 1)]
    run_threads([*(partial(submit, own=half) for half in halves), finish], 2 * budget)
    closers = [threading.Thread(target=queue.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    finished.extend(queue.get_finished())
    assert sorted(job[0] for job in finished) == sorted(submitted)
    assert all(success and num_bytes == n * page_bytes for n, success, num_bytes, _ in finished)


def test_ids_changed_while_checked_move_nothing(run_threads, budget):
    num_blocks = 4
    memory = np.zeros((3, num_blocks, 64), np.int8)
    address = memory.__array_interface__["data"][0]
    geometry = Geometry([(address + 4 * 64, num_blocks, 64)], [[(0, 64)]], address + 8 * 64, 64, num_blocks)
    ids, host_ids = np.zeros(256, np.int64), np.zeros(256, np.int64)

    def change(rng):
        ids[:] = rng.choice([0, 1 << 40, -5])

    def check(rng):
        try:
            runs = geometry.runs(ids, [256], [0], host_ids)
        except ValueError:
            return
        assert (runs[:, 1] >= address + 4 * 64).all()
        assert (runs[:, 1] + runs[:, 2] <= address + 8 * 64).all()

    run_threads([change, check], budget)
