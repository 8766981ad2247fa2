"""Threads that do a tier's I/O: urgent tasks first, every task answered, nobody waited for.

Python threads serve because the system calls and checksums they spend their time in release the GIL.
"""

from __future__ import annotations

import time
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import Generic, Protocol, TypeVar


class Task(Protocol):
    """Something to do in a thread; it keeps its own outcome."""

    error: str

    def run(self) -> None:
        """Do it; what is raised ends up in `error`."""


T = TypeVar("T", bound=Task)


class IOThreads(Generic[T]):
    """Run tasks in threads and hand them back when they are done.

    Parameters
    ----------
    num_threads : int
        Tasks in flight at most, >= 1.
    name : str
        Of the threads, for debuggers.

    Notes
    -----
    Neither `submit` nor `finished` ever waits: the queues are C code that holds its locks for a few instructions.
    The threads are daemons, so one that hangs in a dead mount does not keep the process.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._urgent: deque[T] = deque()
        self._patient: deque[T] = deque()
        self._done: deque[T] = deque()
        self._threads = [Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: T, urgent: bool) -> None:
        """Queue a task; urgent ones overtake the others that have not begun."""
        (self._urgent if urgent else self._patient).append(task)
        self._tokens.put(True)

    def finished(self) -> list[T]:
        """Return the tasks that ended since the last call."""
        done = self._done
        return [done.popleft() for _ in range(len(done))]

    def close(self, timeout_s: float) -> bool:
        """Let the threads end after the queued tasks; return whether they all did in time."""
        for _ in self._threads:
            self._tokens.put(False)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while self._tokens.get():
            # There are never more tokens than tasks; another thread may take the urgent one seen here.
            try:
                task = self._urgent.popleft()
            except IndexError:
                task = self._patient.popleft()
            try:
                task.run()
            except Exception as error:
                task.error = f"{type(error).__name__}: {error}"
            self._done.append(task)
            del task
