"""Time to first token over a real server behind a link of 50 MB/s: with an arbiter, always loading, never loading.

``python -m asv_benchmarks.arbiter`` needs a Valkey or Redis server and prints every length of prefix; asv tracks the
worst.
The engine computes by sleeping: `FIRST_S` for the first block, longer for later blocks, as with attention. So computing
is faster for short prefixes, and loading for long ones.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import numpy as np
from servers import find_valkey, running_valkey
from valkey import Valkey

from kvcache.request import ReqContext
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.valkey import ValkeyTier

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

LINK_BYTES_PER_S = 50e6
BLOCK_BYTES = 1 << 20
BLOCK_TOKENS = 16
FIRST_S = 0.014
DOUBLES_AT_BLOCKS = 24
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 48)
STEP_S = 0.001
_CHUNK_BYTES = 1 << 14


class ThrottledLink:
    """A TCP proxy whose answers share a link of so many bytes a second.

    Parameters
    ----------
    port : int
        Of the server, on loopback.
    bytes_per_s : float
        Of all connections together.
    """

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._target, self._bytes_per_s = port, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free_s = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, target, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._copy, args=(source, target, is_answer), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if is_answer:
                    with self._lock:
                        self._free_s = max(self._free_s, time.monotonic()) + len(data) / self._bytes_per_s
                        wait_s = self._free_s - time.monotonic()
                    # Short sleeps overrun, so small pauses are added up and slept together.
                    if wait_s > STEP_S:
                        time.sleep(wait_s)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def compute_s(first: int, last: int) -> float:
    """Return how long blocks `first` to `last` of a prompt take to compute."""
    return sum(FIRST_S * (1 + i / DOUBLES_AT_BLOCKS) for i in range(first, last))


class Engine:
    """One request at a time, over a manager with the throttled tier.

    Parameters
    ----------
    url : str
        Of the server, behind the link.
    arbiter : bool
        Whether loading is arbitrated.
    """

    def __init__(self, url: str, arbiter: bool) -> None:
        flat = np.frombuffer(mmap.mmap(-1, 2 * max(LENGTHS) * BLOCK_BYTES), np.uint8)
        host: HostBlocks = flat.reshape(-1, BLOCK_BYTES)
        rule = TierConfig(arbiter=arbiter, deadline_s=30.0)
        tier = ValkeyTier(url, host, fingerprint={"model": "m"}, timeout_s=30.0)
        self.manager = TieredOffloadingManager(BLOCK_TOKENS, len(host), [(tier, rule)], deadline_s=30.0)

    def first_token_s(self, keys: Sequence[bytes]) -> float:
        """Return how long it takes until all blocks of a prompt are loaded or computed."""
        start_s, request = time.perf_counter(), ReqContext()
        while (num_found := self.manager.lookup(list(keys), request)) is None:
            self.manager.on_schedule_end()
            time.sleep(STEP_S)
        self.manager.prepare_load(keys[:num_found], request)
        self.manager.complete_load(keys[:num_found], request)
        computing_s = time.perf_counter()
        if num_found < len(keys):
            time.sleep(compute_s(num_found, len(keys)))
            seconds = time.perf_counter() - computing_s
            self.manager.report_prefill(num_found * BLOCK_TOKENS, (len(keys) - num_found) * BLOCK_TOKENS, seconds)
        waited_s = time.perf_counter() - start_s
        self.manager.on_request_finished(request)
        self.manager.settle(30.0)
        return waited_s


Seconds = dict[str, dict[int, list[float]]]


def measure(num_rounds: int, progress: Callable[[str], None] = lambda _: None) -> Seconds:
    """Return the seconds to the first token by way and by blocks of the prefix, in rounds one after the other.

    Parameters
    ----------
    num_rounds : int
        Prompts of each length, each asked of every engine. One more round goes before, to learn from.
    progress : callable
        Called with the name of the current step.

    Returns
    -------
    dict
        ``"arbiter"``, ``"always"``, ``"never"``.
    """
    if find_valkey() is None:
        raise NotImplementedError("needs valkey-server or redis-server")
    seconds: Seconds = {way: {length: [] for length in LENGTHS} for way in ("arbiter", "always", "never")}
    with ExitStack() as stack:
        port = stack.enter_context(running_valkey())
        link = ThrottledLink(port, LINK_BYTES_PER_S)
        stack.callback(link.close)
        url = f"valkey://127.0.0.1:{link.port}"
        engines = {way: Engine(url, way == "arbiter") for way in ("arbiter", "always")}
        for engine in engines.values():
            stack.callback(engine.manager.shutdown)
        direct = f"valkey://127.0.0.1:{port}"
        host: HostBlocks = np.zeros((max(LENGTHS), BLOCK_BYTES), np.uint8)
        writer = ValkeyTier(direct, host, fingerprint={"model": "m"})
        stack.callback(writer.shutdown)
        client = stack.enter_context(Valkey.from_url(direct))
        names = itertools.count(1)
        for number in range(-1, num_rounds):
            for length in LENGTHS:
                progress(f"round {number + 1} of {num_rounds}, {length} blocks")
                keys = [b"%08d-%08d" % (next(names), i) for i in range(length)]
                _store(writer, keys)
                begun_s = time.perf_counter()
                time.sleep(compute_s(0, length))
                took_s = {"never": time.perf_counter() - begun_s}
                for way, engine in engines.items():
                    took_s[way] = engine.first_token_s(keys)
                    if number < 0:
                        # The arbiter learns the prefill rate from blocks that no store holds.
                        engine.first_token_s([b"%08d-%08d" % (next(names), i) for i in range(length)])
                client.flushdb()
                if number >= 0:
                    for way, value in took_s.items():
                        seconds[way][length].append(value)
    return seconds


def ratios(seconds: Seconds) -> dict[int, float]:
    """Return, by blocks of the prefix, the arbiter's time to first token over the better one of the other two.

    Parameters
    ----------
    seconds : dict
        As of `measure`.

    Returns
    -------
    dict
        Medians over the rounds.
    """
    median = {way: {length: statistics.median(by[length]) for length in LENGTHS} for way, by in seconds.items()}
    return {
        length: median["arbiter"][length] / min(median["always"][length], median["never"][length]) for length in LENGTHS
    }


def _store(tier: ValkeyTier, keys: list[bytes]) -> None:
    end_s = time.monotonic() + 30
    assert tier.submit_store(1, keys, list(range(len(keys))))
    while not (results := tier.get_finished()):
        if time.monotonic() > end_s:
            raise OSError(f"the server does not answer: {tier.stats()}")
        time.sleep(STEP_S)
    if results[0].failed or results[0].error:
        raise OSError(f"the server did not take the blocks: {results[0]}")


class ArbiterOnALink:
    """The arbiter against the better of always and never loading, at the length where it does worst."""

    timeout = 600
    unit = "ratio"

    def track_worst_ratio(self) -> float:
        return max(ratios(measure(2)).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    seconds = measure(parser.parse_args().rounds, lambda text: print(text, end="  \r", file=sys.stderr))
    print(f"{'blocks':>6} {'always':>9} {'never':>9} {'arbiter':>9} {'ratio':>6}      (medians, seconds)")
    for length, ratio in ratios(seconds).items():
        row = [statistics.median(seconds[way][length]) for way in ("always", "never", "arbiter")]
        print(f"{length:6} {row[0]:9.3f} {row[1]:9.3f} {row[2]:9.3f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
