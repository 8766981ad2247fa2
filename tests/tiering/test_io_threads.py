"""Which task a thread takes next: the urgent first, and none never."""

from __future__ import annotations

import threading

from kvcache.tiering.io_threads import LOAD, QUERY, STORE, STORE_TURN, IOThreads


class Task:
    def __init__(self, name: str, order: list[str], gate: threading.Event | None = None) -> None:
        self.name, self.order, self.gate, self.error = name, order, gate, ""

    def run(self) -> None:
        if self.gate is not None:
            self.gate.wait(30)
        self.order.append(self.name)


def order_of(*tasks: tuple[str, int]) -> list[str]:
    """Return the order in which one thread takes tasks that wait for it."""
    gate, order = threading.Event(), []
    threads = IOThreads(1, "test")
    threads.submit(Task("gate", order, gate), QUERY)
    for name, priority in tasks:
        threads.submit(Task(name, order), priority)
    gate.set()
    assert threads.close(30)
    return order[1:]


def test_queries_go_before_loads_and_loads_before_stores():
    assert order_of(("store", STORE), ("load", LOAD), ("query", QUERY)) == ["query", "load", "store"]


def test_loads_without_an_end_do_not_keep_a_store_for_ever():
    loads = [(f"load {i}", LOAD) for i in range(3 * STORE_TURN)]
    assert order_of(("store", STORE), *loads).index("store") < STORE_TURN
