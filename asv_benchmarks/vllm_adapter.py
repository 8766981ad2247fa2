"""What the vLLM adapter costs a key, through vLLM's own interface, beside vLLM's own manager in one run.

``python -m asv_benchmarks.vllm_adapter [TRACE]``, in an environment with vLLM, takes 2,000 requests of the conversation
trace at 32 keys a listed block through a cache of 100,000 blocks as the engine's connector does: one question a key
until the first miss, one load, stores in parts of a scheduler step, completions with sets, the end of the request. It
prints nanoseconds a key by kind of call, the best of three runs, and the cost of a request of 65,536 keys that are
stored one by one. What the engine does itself (keys, contexts, sets) is left out.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from time import process_time_ns
from typing import Any

from asv_benchmarks.traces import MISSING, conversation_path
from kvcache import CPUOffloadingManager
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace

NUM_REQUESTS = 2000
SPLIT = 32
NUM_BLOCKS = 100_000
# Keys of one store: a scheduler step computes 8,192 tokens in blocks of 16.
STEP_KEYS = 512
LONG_REQUEST_KEYS = 65_536
KINDS = ("new", "lookup", "load", "store", "end")


def context_of(number: int, keys: list[bytes]) -> Any:
    """Return the engine's context of a request, with the position of every key, as its connector fills it in."""
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(req_id=str(number))
    if hasattr(context, "set_offload_key_position"):
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
    return context


def serve(manager: Any, requests: Iterable[list[bytes]], step_keys: int = STEP_KEYS) -> tuple[dict[str, int], int, int]:
    """Take every request through the connector's calls; return the nanoseconds by kind of call, keys and hits."""
    from vllm.v1.kv_offload.base import LookupResult

    hit = LookupResult.HIT
    spent = dict.fromkeys(KINDS, 0)
    num_keys = num_hits = 0
    now = process_time_ns
    gc.collect()
    gc.disable()
    for number, keys in enumerate(requests):
        context = context_of(number, keys)
        times = [now()]
        manager.on_new_request(context)
        times.append(now())
        hits = 0
        lookup = manager.lookup
        for key in keys:
            if lookup(key, context) is not hit:
                break
            hits += 1
        times.append(now())
        spent_loading = 0
        if hits:
            leading = keys[:hits]
            loaded = set(leading)  # the connector's work
            began = now()
            manager.prepare_load(leading, context)
            manager.complete_load(loaded, context)
            spent_loading = now() - began
        times.append(times[-1] + spent_loading)
        spent_storing = 0
        for start in range(hits, len(keys), step_keys):
            part = keys[start : start + step_keys]
            began = now()
            output = manager.prepare_store(part, context)
            spent_storing += now() - began
            if output is not None and output.keys_to_store:
                stored = set(output.keys_to_store)  # the connector's work
                began = now()
                manager.complete_store(stored, context)
                spent_storing += now() - began
        began = now()
        manager.on_request_finished(context)
        times += [times[-1] + spent_storing, times[-1] + spent_storing + now() - began]
        for i, kind in enumerate(KINDS):
            spent[kind] += times[i + 1] - times[i]
        num_keys += len(keys)
        num_hits += hits
    gc.enable()
    return spent, num_keys, num_hits


def ours(num_blocks: int, policy: str = "lru") -> Any:
    """Return the adapter over a manager of `num_blocks`."""
    from kvcache.integrations.vllm.manager import KVCacheOffloadingManager
    from kvcache.integrations.vllm.releases import installed_release

    return KVCacheOffloadingManager(CPUOffloadingManager(16, num_blocks, policy), installed_release())


def theirs(num_blocks: int, policy: str = "lru") -> Any:
    """Return vLLM's own manager of `num_blocks`."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as EngineManager

    return EngineManager(num_blocks, cache_policy=policy)


def best(
    make: Callable[[], Any], requests: list[Request], split: int, runs: int, step_keys: int = STEP_KEYS
) -> tuple[dict[str, float], int]:
    """Return the least nanoseconds a key by kind over `runs` runs, and the hits."""
    found: dict[str, float] = {}
    num_hits = 0
    for _ in range(runs):
        make_keys = KeyMaker(split)
        spent, num_keys, num_hits = serve(make(), (make_keys(request.hash_ids) for request in requests), step_keys)
        for kind, nanoseconds in spent.items():
            found[kind] = min(found.get(kind, float("inf")), nanoseconds / num_keys)
    return found, num_hits


def one_by_one(manager: Any, num_keys: int = LONG_REQUEST_KEYS) -> float:
    """Return the seconds that one request takes that stores `num_keys` keys, a key a call."""
    keys = [number.to_bytes(32, "little") + bytes(4) for number in range(num_keys)]
    spent, _, _ = serve(manager, [keys], step_keys=1)
    return sum(spent.values()) / 1e9


class Serve:
    """2,000 requests at 32 keys a block through a cache of 100,000 blocks; skipped where vLLM is not installed."""

    timeout = 600
    unit = "ns"

    def setup(self) -> None:
        path = conversation_path()
        try:
            import vllm  # noqa: F401
        except ImportError:
            raise NotImplementedError("vLLM is not installed") from None
        if path is None:
            raise NotImplementedError("the conversation trace is not there")
        with Trace(path) as trace:
            self.requests = list(islice(trace, NUM_REQUESTS))

    def track_ns_per_key(self) -> float:
        found, _ = best(lambda: ours(NUM_BLOCKS), self.requests, SPLIT, 3)
        return sum(found.values())


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=conversation_path())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-keys", type=int, default=STEP_KEYS, help="keys of one store at most (default 512)")
    parser.add_argument("--no-theirs", action="store_true", help="leave vLLM's own manager out: it takes minutes")
    parser.add_argument("--no-long", action="store_true", help="leave the request of 65,536 keys out")
    arguments = parser.parse_args()
    if arguments.trace is None:
        sys.exit(f"error: {MISSING}")
    with Trace(arguments.trace) as trace:
        requests = list(islice(trace, NUM_REQUESTS))
    cases: list[tuple[str, Callable[[int], Any], int]] = [("kvcache", ours, arguments.runs)]
    if not arguments.no_theirs:
        cases.append(("vLLM", theirs, 1))
    print(f"{'ns a key':<10}", *(f"{kind:>8}" for kind in (*KINDS, "all")), "    hits", sep="")
    for name, make, runs in cases:
        found, num_hits = best(partial(make, NUM_BLOCKS), requests, SPLIT, runs, arguments.step_keys)
        row = (*found.values(), sum(found.values()))
        print(f"{name:<10}", *(f"{value:8.1f}" for value in row), f"{num_hits:9,}", sep="", flush=True)
    if not arguments.no_long:
        for name, make, _ in cases:
            for capacity in (LONG_REQUEST_KEYS, LONG_REQUEST_KEYS // 4):
                seconds = one_by_one(make(capacity))
                print(
                    f"{name}: {LONG_REQUEST_KEYS:,} keys one by one into {capacity:,} blocks {seconds:.2f} s",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
