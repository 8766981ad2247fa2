"""A scheduler's loop with many jobs in flight over a store, and faults of the store.

The loop asks for prompts whose blocks are mostly in the store, loads the hits, compares every byte, and stores the
rest. The cost of a call is the CPU time of its thread. Its waits are voluntary switches of the thread, which are
counted and not timed. A busy machine changes neither.
"""

import gc
import random
import resource
import sys
import time
from contextlib import contextmanager
from itertools import count

import numpy as np
from servers import ValkeyServer
from stores import MooncakeStore, MotoServer, Proxy, blocks, pause, put, resume, wait_for_reset
from valkey import Valkey

from kvcache import ReqContext, TierConfig, TieredOffloadingManager
from kvcache.assembly.assemble import parse_tier
from kvcache.tiers.mooncake import load_client

BLOCK_BYTES = 1 << 16
NUM_HOST = 96
DEADLINE_S = 0.5
PAUSE_S = 0.5
_NUM_REQUESTS = 8
_CHAIN_BLOCKS = 12
_NUM_CHAINS = 24
_STEP_S = 0.001
_NUM_PARTS = 3
_FRESH_CHAIN = 1 / 16
_WARM_BLOCKS = 50
_SLACK_STEPS = 100
_LIMIT_S = 60.0
_WORKING_PUTS = 32


def key_of(chain, i):
    return b"%06d-%06d" % (chain, i) + bytes(20)


def fill(block, key):
    """Write the bytes that a key stands for: every 8 of them are different."""
    number = int(key[:6]) * 4099 + int(key[7:13])
    block.view(np.uint64)[:] = np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * 2654435761 + number


class Traffic:
    """A scheduler over one tier; it counts blocks with wrong bytes, and requests that waited after their deadline."""

    def __init__(self, tier, host, seed=0, deadline_s=DEADLINE_S, pause_s=PAUSE_S, max_failures=3):
        self.host = host
        rule = TierConfig(deadline_s=deadline_s, pause_s=pause_s, max_store_blocks=24, max_failures=max_failures)
        self.manager = TieredOffloadingManager(16, len(host), [(tier, rule)], deadline_s=deadline_s)
        self._deadline_s = deadline_s
        self.num_wrong = self.num_late = self.num_answers = 0
        self._num_chains = _NUM_CHAINS
        self._dice = random.Random(seed)
        self._asking = []
        self._expected = np.zeros(BLOCK_BYTES, np.uint8)
        self._calls = []

    def counts(self):
        """Return the number of loaded blocks, of stored blocks, and of failures."""
        (stats,) = self.manager.tier_stats()
        tier = stats.tier
        num_bad = stats.failed_jobs + stats.overdue_jobs + tier.corrupt_blocks + tier.missed_blocks
        return stats.promoted_blocks, stats.written_blocks, num_bad + tier.refused_blocks + tier.io_errors

    def run_through(self, fault, fault_s, longest_job_s):
        """Break something, repair it, and check that traffic comes back within one pause of the breaker.

        A job that tries the tier as the fault ends may fail as late as `longest_job_s` after it.
        """
        before = self.counts()
        with fault:
            fault_end_s = time.monotonic() + fault_s
            # On a busy machine it takes longer until something breaks.
            self.run_until(lambda: time.monotonic() >= fault_end_s and self.counts()[2] > before[2])
        since, due_s, num_late_steps = self.counts(), time.monotonic() + PAUSE_S + longest_job_s, 0

        def is_back():
            nonlocal num_late_steps
            num_late_steps += time.monotonic() > due_s
            # Steps, as a busy machine has fewer of them in the same time.
            assert num_late_steps < _SLACK_STEPS, self.manager.tier_stats()
            return all(now > before for now, before in zip(self.counts()[:2], since, strict=False))

        self.run_until(is_back)

    def warm_up(self):
        """Run until blocks have been stored, evicted from host memory and loaded."""
        self.run_until(lambda: self.counts()[0] > _WARM_BLOCKS)
        self._calls.clear()

    def run_until(self, is_over, limit_s=_LIMIT_S):
        end_s = time.monotonic() + limit_s
        while not is_over():
            assert time.monotonic() < end_s, (self.manager.tier_stats(), self.manager.stats())
            self.step()

    def step(self):
        """Make the calls of a scheduler's step, and sleep for the time of a short forward pass."""
        while len(self._asking) < _NUM_REQUESTS:
            if self._dice.random() < _FRESH_CHAIN:
                # Something is always left to be stored.
                self._num_chains += 1
                chain = self._num_chains
            else:
                chain = self._dice.randrange(_NUM_CHAINS)
            self._asking.append((ReqContext(), [key_of(chain, i) for i in range(_CHAIN_BLOCKS)], 0.0))
        for request in list(self._asking):
            self._serve(request)
        self._call(self.manager.on_schedule_end)
        time.sleep(_STEP_S)

    def _serve(self, request):
        context, keys, late_s = request
        asked_s = time.monotonic()
        num_found = self._call(self.manager.lookup, keys, context)
        if num_found is None:
            # What began to wait before `late_s` less the deadline must have its answer by now.
            self.num_late += late_s > 0 and asked_s >= late_s
            if not late_s:
                self._asking[self._asking.index(request)] = (context, keys, time.monotonic() + self._deadline_s)
            return
        self._asking.remove(request)
        self.num_answers += 1
        if num_found:
            ids = self._call(self.manager.prepare_load, keys[:num_found], context).block_ids
            for key, block_id in zip(keys, ids, strict=False):
                fill(self._expected, key)
                self.num_wrong += not np.array_equal(self._expected, self.host[block_id])
            self._call(self.manager.complete_load, keys[:num_found], context)
        output = self._call(self.manager.prepare_store, keys[num_found:], context)
        if output is not None:
            for key, block_id in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
                fill(self.host[block_id], key)
            self._call(self.manager.complete_store, output.keys_to_store, context)
        self._call(self.manager.on_request_finished, context)

    def _call(self, method, *arguments):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        start_s = time.thread_time()
        answer = method(*arguments)
        seconds = time.thread_time() - start_s
        self._calls.append((seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before))
        return answer

    def check(self, max_s=0.002):
        """Fail if a byte was wrong, a request late, a call dear, or if calls wait for anything."""
        assert self.num_wrong == 0
        assert self.num_late == 0
        assert self.num_answers > 0
        size = -(-len(self._calls) // _NUM_PARTS)
        parts = [self._calls[first : first + size] for first in range(0, len(self._calls), size)]
        # What else a machine does makes a single call dear; a tier that is waited for makes it so all the time.
        assert min(max(seconds for seconds, _ in part) for part in parts) < max_s
        num_waits = sum(waits > 0 for _, waits in self._calls)
        assert num_waits <= len(self._calls) // 100, f"{num_waits} of {len(self._calls)} calls waited"


@contextmanager
def undisturbed():
    """Keep the garbage collector, and threads that want the interpreter, from interrupting a call."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.2)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


class ProxyFaults:
    """A server behind a proxy, and what can happen to both: methods that break something, and repair it at their end.

    The names of the proxy's modes are faults, too.
    """

    # Further options of the tier; "PORT" stands for the proxy's.
    OPTIONS = {}  # noqa: RUF012

    def __init__(self, server, stack):
        self._stack, self.server = stack, server
        stack.callback(server.kill)
        self.proxy = Proxy(server.port)
        stack.callback(self.proxy.close)

    def open_tier(self, host, **others):
        options = {name: str(value).replace("PORT", str(self.proxy.port)) for name, value in self.OPTIONS.items()}
        return parse_tier(options | others).make(host, {})

    def begin(self, name):
        """Return a fault as a context."""
        return getattr(self, name)() if hasattr(self, name) else self._spoil(name)

    @contextmanager
    def _spoil(self, mode):
        self.proxy.set_mode(mode)
        yield
        self.proxy.set_mode("pass")

    @contextmanager
    def another_tenants_values(self):
        """Put a value of another tenant's in the place of each that this one may have."""
        host = blocks(1, BLOCK_BYTES)
        own, other = self.open_tier(host, timeout_s=20), self.open_tier(host, timeout_s=20, salt="another tenant's")
        for tier in (own, other):
            self._stack.callback(tier.shutdown)
            wait_for_reset(tier)
        seal = other._namespace.seal(other.store_name(b"a key"), bytes(BLOCK_BYTES))
        names = [own.store_name(key_of(chain, i)) for chain in range(_NUM_CHAINS) for i in range(_CHAIN_BLOCKS)]
        for name, is_held in zip(names, own.are_held(names), strict=True):
            if is_held:
                put(own, name, seal)
        yield

    @contextmanager
    def stopped(self, pid=None):
        pid = pid or self.server.pid
        pause(pid)
        try:
            yield
        finally:
            resume(pid)
        self._wait_until_it_works()

    def _wait_until_it_works(self):
        """Return when the store has recovered, if it does not at once."""


class ValkeyFaults(ProxyFaults):
    LONGEST_JOB_S = 0.4
    OPTIONS = {"type": "valkey", "url": "valkey://127.0.0.1:PORT", "timeout_s": LONGEST_JOB_S}  # noqa: RUF012
    NAMES = ("killed", "stopped", "cut", "garbage", "swallow", "half-open", "drip")
    NAMES += ("full", "evicting", "wrong_credentials", "another_tenants_values")

    def __init__(self, folder, stack):
        server = ValkeyServer(folder)
        server.start()
        super().__init__(server, stack)

    @contextmanager
    def killed(self):
        self.server.kill()
        yield
        self.server.start()

    def full(self):
        return self._limit_memory("noeviction", 1.0)

    def evicting(self):
        return self._limit_memory("allkeys-random", 0.7)

    @contextmanager
    def wrong_credentials(self):
        with Valkey(port=self.server.port) as client:
            client.config_set("requirepass", "sesame")
            # Who is connected would stay so.
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield
            client.config_set("requirepass", "")

    @contextmanager
    def _limit_memory(self, policy, share):
        with Valkey(port=self.server.port) as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", int(share * client.info("memory")["used_memory"]))
            yield
            client.config_set("maxmemory", 0)


class S3Faults(ProxyFaults):
    # A request and another try.
    LONGEST_JOB_S = 1.0
    OPTIONS = {"type": "s3", "bucket": "blocks", "endpoint": "http://127.0.0.1:PORT", "timeout_s": 0.4}  # noqa: RUF012
    NAMES = ("stopped", "cut", "garbage", "swallow", "half-open", "drip", "bucket_removed", "another_tenants_values")

    def __init__(self, folder, stack):
        super().__init__(MotoServer("blocks"), stack)

    @contextmanager
    def bucket_removed(self):
        self.server.remove_bucket()
        yield
        self.server.make_bucket()


class MooncakeFaults(ProxyFaults):
    """The server is a master; a node lends it memory."""

    # For the master and then for the node.
    LONGEST_JOB_S = 3.0
    # The first tier of a process sets the time limits of all clients.
    OPTIONS = {"type": "mooncake", "master": "127.0.0.1:PORT", "timeout_s": 1.0}  # noqa: RUF012
    NAMES = ("master_killed", "stopped", "node_stopped", "cut", "garbage", "half-open", "drip")
    # It takes a master ten seconds to give up a node, and until then no client can use the store.
    NAMES += ("full", "another_tenants_values", "node_killed")

    def __init__(self, folder, stack):
        super().__init__(MooncakeStore(folder), stack)
        self.node = self.server.start_node("256MB")
        # Sets the client's time limits.
        self._native = load_client(self.OPTIONS["timeout_s"])
        self._client = self._native.MooncakeDistributedStore()
        assert self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", self.server.master) == 0
        self._wait_until_it_works()

    @contextmanager
    def master_killed(self):
        self.server.kill_master()
        yield
        self.server.start_master()
        self._wait_until_it_works()

    def node_stopped(self):
        return self.stopped(self.node.pid)

    @contextmanager
    def node_killed(self):
        self.node.kill()
        yield
        self.node = self.server.start_node("256MB")
        self._wait_until_it_works()

    @contextmanager
    def full(self):
        """Fill the store with pinned values."""
        config = self._native.ReplicateConfig()
        config.with_hard_pin = True
        value, names = bytes(4 << 20), [f"other {i}" for i in range(100)]
        taken = [name for name in names if self._client.put(name, value, config) == 0]
        assert len(taken) < len(names)
        yield
        for name in taken:
            assert self._client.remove(name, True) == 0

    def _wait_until_it_works(self):
        """Return when a client of its own can store on any node.

        A node takes seconds to report to a master again, and so does a master to give up a node.
        """
        limit_s, numbers, num_in_a_row = time.monotonic() + _LIMIT_S, count(), 0
        while num_in_a_row < _WORKING_PUTS:
            assert time.monotonic() < limit_s
            name = f"works {next(numbers)}"
            num_in_a_row = num_in_a_row + 1 if self._client.put(name, b"1") == 0 else 0
            self._client.remove(name, True)
