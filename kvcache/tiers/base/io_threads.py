"""Threads that do a tier's I/O, urgent tasks first; each task is returned once it has ended.

Python threads suffice, because system calls and checksums release the GIL.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from threading import Event

from kvcache.background import Background

QUERY, LOAD, STORE = 0, 1, 2
"""Priorities: lower numbers begin first, except for one task in `STORE_TURN`."""
STORE_TURN = 4
"""One task in so many is a store if one waits, because endless loads would delay stores past their deadlines."""


class Task:
    """Work on some blocks for a thread; it keeps its own outcome, and an exception of `run` in `error`."""

    keys: list[bytes]
    error = ""

    def run(self) -> None:
        """Do the work."""


class IOThreads:
    """Runs tasks in daemon threads and returns them when they have ended; `submit` and `get_finished` never wait.

    `on_ended` is called after each task, by the thread that ran it.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._waiting: tuple[deque[Task], ...] = (deque(), deque(), deque())
        self._done: deque[Task] = deque()
        self._turns = count(1)
        self.on_ended: Callable[[], object] = lambda: None
        self._threads = [Background(f"{name}-{i}", self._work) for i in range(num_threads)]

    def submit(self, task: Task, priority: int) -> None:
        """Queue a task behind those of its priority: QUERY, LOAD or STORE."""
        self._waiting[priority].append(task)
        self._tokens.put(True)

    def report(self, task: Task) -> None:
        """Return a task that needs no thread from `get_finished`."""
        self._done.append(task)

    def get_finished(self) -> Task | None:
        """Return the next task that has ended, or None."""
        try:
            return self._done.popleft()
        except IndexError:
            return None

    def close(self, timeout_s: float) -> bool:
        """End the threads after the queued tasks; return whether all ended in time."""
        for _ in self._threads:
            self._tokens.put(False)
        end_s = time.monotonic() + timeout_s
        return all(thread.stop(max(0.0, end_s - time.monotonic())) for thread in self._threads)

    def _next(self) -> Task:
        # There are never more tokens than tasks, but another thread may take a task that was seen here.
        queries, loads, stores = self._waiting
        in_turn = (queries, loads, stores) if next(self._turns) % STORE_TURN else (queries, stores, loads)
        while True:
            for waiting in in_turn:
                try:
                    return waiting.popleft()
                except IndexError:
                    continue

    def _work(self, _: Event) -> None:
        while self._tokens.get():
            task = self._next()
            try:
                task.run()
            except BaseException as error:
                # The task must be returned and the thread must serve the next one, whatever was raised.
                task.error = f"{type(error).__name__}: {error}"
            self._done.append(task)
            del task
            self.on_ended()
