"""Threads that do a tier's I/O: urgent tasks first, every task handed back, nobody waited for.

Python threads serve because the system calls and checksums they spend their time in release the GIL.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Generic, Protocol, TypeVar

QUERY, LOAD, STORE = 0, 1, 2
"""Priorities: of the tasks that have not begun, those of a lower number go first, but for one in `STORE_TURN`."""
STORE_TURN = 4
"""One task in so many is a store if one waits: loads without an end would keep stores past their deadlines."""


class Task(Protocol):
    """Something to do in a thread; it keeps its own outcome."""

    error: str

    def run(self) -> None:
        """Do it; what is raised ends up in `error`."""


T = TypeVar("T", bound=Task)


class IOThreads(Generic[T]):
    """Run tasks in threads and hand them back when they are done.

    Notes
    -----
    Neither `submit` nor `get_finished` ever waits: the queues are C code that holds its locks for a few instructions.
    The threads are daemons, so one that hangs in a dead mount does not keep the process.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._waiting: tuple[deque[T], ...] = (deque(), deque(), deque())
        self._done: deque[T] = deque()
        self._turns = count(1)
        self._threads = [Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: T, priority: int) -> None:
        """Queue a task behind those of its priority, which is QUERY, LOAD or STORE."""
        self._waiting[priority].append(task)
        self._tokens.put(True)

    def get_finished(self) -> T | None:
        """Return one task that has ended, in the order in which they did; None: there is no other."""
        try:
            return self._done.popleft()
        except IndexError:
            return None

    def close(self, timeout_s: float) -> bool:
        """Let the threads end after the queued tasks; return whether they all did in time."""
        for _ in self._threads:
            self._tokens.put(False)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self) -> T:
        # There are never more tokens than tasks; but another thread may take the one that was seen here.
        queries, loads, stores = self._waiting
        in_turn = (queries, loads, stores) if next(self._turns) % STORE_TURN else (queries, stores, loads)
        while True:
            for waiting in in_turn:
                try:
                    return waiting.popleft()
                except IndexError:
                    continue

    def _work(self) -> None:
        while self._tokens.get():
            task = self._next()
            try:
                task.run()
            except BaseException as error:
                # Whatever it was, the task must be handed back, and the thread must serve the next one.
                task.error = f"{type(error).__name__}: {error}"
            self._done.append(task)
            del task
