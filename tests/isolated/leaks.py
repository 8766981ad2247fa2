"""Store and evict many blocks and count leaks: key objects by reference, BlockStatus objects by the collector.

Prints the growth in later rounds (key references, BlockStatus objects, KiB), and the numbers of the first two after the
manager is destroyed. stress/test_isolated.py runs it.
"""

import gc
import sys
import tracemalloc
from contextlib import suppress

from kvcache import BackendOffloadingManager, BlockStatus, CPUBackend, CPUOffloadingManager, ReqContext

KEYS = [b"a key of its own %d" % i for i in range(300)]


def churn(manager, rounds):
    for i in range(rounds):
        context = ReqContext()
        keys = [KEYS[(7 * i + j) % 300] for j in range(12)]
        manager.lookup(keys, context)
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        manager.complete_store(keys[:9], context)
        manager.complete_store(keys, context, success=False)
        ready = keys[: manager.lookup(keys, context)]
        manager.prepare_load(ready, context)
        views = [manager.policy.get(key) for key in keys]
        for call, bad in (
            (manager.prepare_load, b"absent"),
            (manager.complete_load, b"absent"),
            (manager.prepare_store, b""),
            (manager.touch, b""),
        ):
            with suppress(KeyError, ValueError):
                call([keys[0], bad], context)
        manager.complete_load(ready, context)
        if i % 3:
            manager.on_request_finished(context)
        if i % 50 == 49:
            manager.reset_cache()
        list(manager.take_events())
        del context, output, views


def held():
    gc.collect()
    references = sum(sys.getrefcount(key) for key in KEYS)
    blocks = sum(isinstance(thing, BlockStatus) for thing in gc.get_objects())
    return references, blocks, tracemalloc.get_traced_memory()[0] // 1024


def main(kind, policy):
    if kind == "cpu":
        manager = CPUOffloadingManager(16, 40, policy, enable_events=True, store_threshold=2, max_tracker_size=100)
    else:
        manager = BackendOffloadingManager(CPUBackend(16, 40), policy, enable_events=True)
    tracemalloc.start()
    churn(manager, 250)
    manager.reset_cache()
    before = held()
    churn(manager, 1250)
    manager.reset_cache()
    after = held()
    del manager
    left = held()
    fresh = sum(sys.getrefcount(key) for key in [bytes(bytearray(key)) for key in KEYS])
    print(*(late - early for early, late in zip(before, after, strict=True)), left[0] - fresh, left[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
