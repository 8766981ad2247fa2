"""Cost of one manager call of 1,024 keys: mean, worst case and memory, at 10k, 100k and 1M blocks.

``python -m asv_benchmarks.calls`` prints the worst call of each kind at 1,000,000 blocks, with and without the oldest
half of all blocks referenced: for each call the minimum over five identical replays, with the garbage collector frozen,
which excludes hiccups of the machine. Figures in microseconds. For a policy that reads the clock, its key memory is
full, and three more cases are shown: an hour after the last request; then with the oldest half referenced; then with
the last block of every request referenced, so that no block can be evicted.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

from asv_benchmarks.traces import agents_path, conversation_path, serve_groups
from asv_benchmarks.traces import fresh_keys as keys_of_requests
from kvcache import CPUOffloadingManager, ReqContext
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.trace import Trace
from kvcache.registry import POLICIES

BATCH = 1024
NUM_REPLAYS = 5
SHORT = 16  # keys of a request where many requests count
NUM_BLOCKS = 1_000_000
MOST_US = 2000.0


def fresh_keys(first: int, count: int = BATCH) -> list[bytes]:
    """Return new key objects, as an engine makes them for every request: 32 bytes of hash, 4 of group."""
    return [number.to_bytes(32, "little") + bytes(4) for number in range(first, first + count)]


def fill(manager: Any, num_blocks: int) -> None:
    """Store blocks 0 to num_blocks - 1, a request of 1,024 after the other."""
    for first in range(0, num_blocks, BATCH):
        context = ReqContext()
        output = manager.prepare_store(fresh_keys(first, min(BATCH, num_blocks - first)), context)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)


class Calls:
    """One call of 1,024 fresh key objects on a full cache."""

    params = (POLICIES.names(), (10_000, 100_000, 1_000_000))
    param_names = ("policy", "num_blocks")

    def setup(self, policy: str, num_blocks: int) -> None:
        self.manager = CPUOffloadingManager(16, num_blocks, policy)
        fill(self.manager, num_blocks)
        self.next_key = num_blocks
        self.middle = num_blocks // 2

    def time_lookup_hit(self, policy: str, num_blocks: int) -> None:
        self.manager.lookup(fresh_keys(self.middle))

    def time_touch(self, policy: str, num_blocks: int) -> None:
        self.manager.touch(fresh_keys(self.middle))

    def time_load(self, policy: str, num_blocks: int) -> None:
        keys = fresh_keys(self.middle)
        self.manager.prepare_load(keys)
        self.manager.complete_load(keys)

    def time_store_evicting(self, policy: str, num_blocks: int) -> None:
        output = self.manager.prepare_store(fresh_keys(self.next_key))
        self.manager.complete_store(output.keys_to_store)
        self.next_key += BATCH

    def time_request(self, policy: str, num_blocks: int) -> None:
        context = ReqContext()
        keys = fresh_keys(self.next_key - BATCH)
        manager = self.manager
        hits = manager.lookup(keys, context)
        manager.touch(keys, context)
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
        output = manager.prepare_store(keys, context)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)


class Memory:
    """Resident bytes per block of a full cache of 1,000,000 blocks, ghosts and histories full, keys left out."""

    params = (POLICIES.names(),)
    param_names = ("policy",)
    unit = "bytes"
    timeout = 600

    def track_bytes_per_block(self, policy: str) -> float:
        return bytes_per_block(policy)


def bytes_per_block(policy: str, num_blocks: int = NUM_BLOCKS) -> float:
    """Measure the growth of the resident set beyond that of a manager's key objects."""
    import subprocess

    code = f"from asv_benchmarks.calls import _measure_bytes; print(_measure_bytes({policy!r}, {num_blocks}))"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    return float(done.stdout)


def _measure_bytes(policy: str, num_blocks: int) -> float:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    # Every key that is ever used is made before, so that only the manager's own memory grows.
    num_keys = 6 * num_blocks
    requests = [fresh_keys(first, min(BATCH, num_keys - first)) for first in range(0, num_keys, BATCH)]
    gc.collect()
    before = resident()
    manager = CPUOffloadingManager(16, num_blocks, policy)
    for keys in requests:
        context = ReqContext()
        output = manager.prepare_store(keys, context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
        if keys[0][0] % 2:
            manager.touch(keys)  # seen again: both ghost lists of arc fill
        manager.on_request_finished(context)
    return (resident() - before) / num_blocks


def scenario(policy: str, half_referenced: bool, num_blocks: int = NUM_BLOCKS) -> Iterator[tuple[str, int]]:
    """Yield (kind, nanoseconds) of every call on a full cache: hits, misses, loads that come back out of order."""
    manager = CPUOffloadingManager(16, num_blocks, policy)

    def timed(kind: str, call: Callable[..., Any], *arguments: Any) -> tuple[tuple[str, int], Any]:
        start = perf_counter_ns()
        answer = call(*arguments)
        return (kind, perf_counter_ns() - start), answer

    batches = [fresh_keys(first, min(BATCH, num_blocks - first)) for first in range(0, num_blocks, BATCH)]
    for keys in batches:
        context = ReqContext()
        took, output = timed("prepare_store, filling", manager.prepare_store, keys, context)
        yield took
        yield timed("complete_store", manager.complete_store, output.keys_to_store, context)[0]
        yield timed("on_request_finished", manager.on_request_finished, context)[0]
    oldest_half = batches[: len(batches) // 2]
    if half_referenced:
        for keys in oldest_half:
            yield timed("prepare_load", manager.prepare_load, keys)[0]
    for i in range(200):
        context = ReqContext()
        keys = fresh_keys(num_blocks + i * BATCH)
        yield timed("lookup, miss", manager.lookup, keys, context)[0]
        yield timed("touch, miss", manager.touch, keys, context)[0]
        took, output = timed("prepare_store, evicting", manager.prepare_store, keys, context)
        yield took
        yield timed("complete_store", manager.complete_store, output.keys_to_store, context)[0]
        yield timed("on_request_finished", manager.on_request_finished, context)[0]
        context = ReqContext()
        keys = [bytes(bytearray(key)) for key in batches[-1 - i]]
        took, hits = timed("lookup, hit", manager.lookup, keys, context)
        yield took
        yield timed("touch, hit", manager.touch, keys, context)[0]
        yield timed("prepare_load", manager.prepare_load, keys[:hits], context)[0]
        yield timed("complete_load", manager.complete_load, keys[:hits], context)[0]
        yield timed("on_request_finished", manager.on_request_finished, context)[0]
    if half_referenced:
        random.Random(1).shuffle(oldest_half)
        for keys in oldest_half:
            yield timed("complete_load, out of order", manager.complete_load, keys)[0]
        for i in range(200):
            keys = fresh_keys(2 * num_blocks + i * BATCH)
            took, output = timed("prepare_store, evicting from the heap", manager.prepare_store, keys)
            yield took
            yield timed("complete_store", manager.complete_store, output.keys_to_store)[0]


AGED_CASES = ("nothing referenced", "oldest half referenced", "every request's last block referenced")


def aged_scenario(policy: str, case: str, num_blocks: int = NUM_BLOCKS) -> Iterator[tuple[str, int]]:
    """Yield (kind, nanoseconds) of every call an hour after the last of many short requests, the memory being full."""
    now_s = 0.0
    manager = CPUOffloadingManager(16, num_blocks, policy, clock=lambda: now_s)

    def timed(kind: str, call: Callable[..., Any], *arguments: Any) -> tuple[tuple[str, int], Any]:
        start = perf_counter_ns()
        answer = call(*arguments)
        return (kind, perf_counter_ns() - start), answer

    # More keys than are stored: the rest is remembered.
    for first in range(0, 6 * num_blocks, SHORT):
        now_s += 0.001
        context = ReqContext()
        keys = fresh_keys(first, SHORT)
        yield timed("touch, short", manager.touch, keys, context)[0]
        took, output = timed("prepare_store, short", manager.prepare_store, keys, context)
        yield took
        manager.complete_store(output.keys_to_store, context)
    resident = []
    for first in range(0, 6 * num_blocks, SHORT):
        keys = fresh_keys(first, SHORT)
        if hits := manager.lookup(keys):
            resident.append(keys[:hits])
    if case == AGED_CASES[1]:
        for keys in resident[: len(resident) // 2]:
            yield timed("prepare_load", manager.prepare_load, keys)[0]
    elif case == AGED_CASES[2]:
        for keys in resident:
            yield timed("prepare_load", manager.prepare_load, keys[-1:])[0]
    now_s += 3600.0
    for i in range(600):
        now_s += 0.1
        context = ReqContext()
        keys = fresh_keys(7 * num_blocks + i * BATCH)
        yield timed("touch, miss", manager.touch, keys, context)[0]
        took, output = timed("prepare_store, evicting", manager.prepare_store, keys, context)
        yield took
        yield timed("complete_store", manager.complete_store, output.keys_to_store, context)[0]
        yield timed("on_request_finished", manager.on_request_finished, context)[0]
        yield timed("touch, remembered", manager.touch, fresh_keys(5 * num_blocks + i * BATCH // 2), ReqContext())[0]


def trace_scenario(policy: str, num_blocks: int, requests: list[Any], split: int) -> Iterator[tuple[str, int]]:
    """Yield (kind, nanoseconds of the thread's CPU) of every call of a trace, each of its blocks as `split` blocks."""
    now_s = 0.0
    manager: Any = CPUOffloadingManager(16, num_blocks, policy, clock=lambda: now_s)

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        start = thread_time_ns()
        answer = call(*arguments)
        took.append((call.__name__, thread_time_ns() - start))
        return answer

    for request, keys in zip(requests, keys_of_requests(requests, split), strict=True):
        took: list[tuple[str, int]] = []
        now_s = request.arrival_s
        context = ReqContext()
        hits = timed(manager.lookup, keys, context)
        timed(manager.touch, keys, context)
        timed(manager.prepare_load, keys[:hits], context)
        timed(manager.complete_load, keys[:hits], context)
        output = timed(manager.prepare_store, keys, context)
        if output is not None:
            timed(manager.complete_store, output.keys_to_store, context)
        timed(manager.on_request_finished, context)
        yield from took


def groups_scenario(
    policy: str, num_blocks: int, requests: list[tuple[float, list[bytes]]], step: int
) -> Iterator[tuple[str, int]]:
    """Yield (kind, nanoseconds of the thread's CPU) of every call of (arrival, keys), with four KV-cache groups.

    Three groups have windows of one block. Each store offers `step` positions.
    """
    now_s = 0.0
    took: list[tuple[str, int]] = []
    windows = {"group_windows": [None, 1, 1, 1]} if policy == "gittins" else {}
    manager: Any = CPUOffloadingManager(512, num_blocks, policy, clock=lambda: now_s, **windows)

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        start = thread_time_ns()
        answer = call(*arguments)
        took.append((call.__name__, thread_time_ns() - start))
        return answer

    for arrival_s, keys in requests:
        now_s = arrival_s
        took.clear()
        serve_groups(manager, keys, [1, 1, 1], step, timed)
        yield from took


def worst_calls(policy: str, half_referenced: bool, num_blocks: int = NUM_BLOCKS) -> dict[str, float]:
    """Return the worst call of each kind in microseconds; of each call the minimum over five identical replays."""
    return worst_of(lambda: scenario(policy, half_referenced, num_blocks))


def worst_of(replay_once: Callable[[], Iterator[tuple[str, int]]], num_replays: int = NUM_REPLAYS) -> dict[str, float]:
    """Return the worst call of each kind in microseconds; of each call the minimum over identical replays."""
    worst: dict[str, float] = {}
    for kind, nanoseconds in least_of(replay_once, num_replays):
        worst[kind] = max(worst.get(kind, 0.0), nanoseconds / 1e3)
    return worst


def least_of(replay_once: Callable[[], Iterator[tuple[str, int]]], num_replays: int) -> list[tuple[str, int]]:
    """Return (kind, nanoseconds) of each call: the minimum over identical replays."""
    least: list[tuple[str, int]] = []
    for replay in range(num_replays):
        gc.collect()
        gc.freeze()
        gc.disable()
        took = list(replay_once())
        gc.enable()
        gc.unfreeze()
        least = took if replay == 0 else [min(a, b) for a, b in zip(least, took, strict=True)]
    return least


class WorstCall:
    """The worst call of 1,024 keys at 1,000,000 blocks, in microseconds."""

    params = (POLICIES.names(), (False, True))
    param_names = ("policy", "half_referenced")
    unit = "us"
    timeout = 600

    def track_worst_call(self, policy: str, half_referenced: bool) -> float:
        return max(worst_calls(policy, half_referenced).values())


class WorstCallAfterAnHour:
    """The worst call of gittins at 1,000,000 blocks an hour after the last request, in microseconds."""

    params = (AGED_CASES,)
    param_names = ("case",)
    unit = "us"
    timeout = 900

    def track_worst_call(self, case: str) -> float:
        return max(worst_of(lambda: aged_scenario("gittins", case), 3).values())


class WorstCallOfTrace:
    """The longest call on a trace in microseconds of CPU: conversation in blocks of 16 tokens, agents of 512."""

    params = (("lru", "gittins"), ("conversation", "agents"), (60_000, 1_000_000))
    param_names = ("policy", "trace", "num_blocks")
    unit = "us"
    timeout = 900

    def track_worst_call(self, policy: str, trace: str, num_blocks: int) -> float:
        path = conversation_path() if trace == "conversation" else agents_path()
        requests: list[Any] = list(ChatWorkload(num_requests=3000))
        if path is not None:
            with Trace(path) as opened:
                requests = list(opened)[:5000]
        split = 32 if trace == "conversation" else 1
        return max(worst_of(lambda: trace_scenario(policy, num_blocks, requests, split), 3).values())


class WorstCallOfGroups:
    """The longest call of gittins with four KV-cache groups at 1,000,000 blocks, in microseconds of CPU."""

    params = (SHORT, BATCH)
    param_names = ("positions",)
    unit = "us"
    timeout = 900

    def track_worst_call(self, positions: int) -> float:
        # 10 s after a long prompt a new one is worth more, and replaces it.
        firsts = range(0, 3 * NUM_BLOCKS // 2, positions)
        requests = [(first / 100, fresh_keys(first, positions)) for first in firsts]
        return max(worst_of(lambda: groups_scenario("gittins", NUM_BLOCKS, requests, BATCH), 3).values())


def main() -> int:
    """Print the table; exit status 1 if a call took more than 2 ms."""
    worst = 0.0
    for policy in sys.argv[1:] or POLICIES.names():
        for half_referenced in (False, True):
            print(f"{policy}, {'oldest half referenced' if half_referenced else 'nothing referenced'}")
            for kind, microseconds in worst_calls(policy, half_referenced).items():
                print(f"  {kind:40} {microseconds:8.0f} us")
                worst = max(worst, microseconds)
        for case in AGED_CASES if getattr(CPUOffloadingManager(16, 1, policy).policy, "reads_clock", False) else ():
            print(f"{policy}, an hour after the last request, {case}")
            for kind, microseconds in worst_of(partial(aged_scenario, policy, case), 3).items():
                print(f"  {kind:40} {microseconds:8.0f} us", flush=True)
                worst = max(worst, microseconds)
        print(f"{policy}: {bytes_per_block(policy):.1f} bytes a block", flush=True)
    return int(worst > MOST_US)


if __name__ == "__main__":
    raise SystemExit(main())
