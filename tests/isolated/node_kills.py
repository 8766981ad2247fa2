"""Kill, stop and reset engines and owners of a node's pool amid copies, and compare every block that is loaded.

Run as ``python tests/isolated/node_kills.py NAME ENGINE_KILLS OWNER_KILLS [DISK]``; prints a line of JSON. An engine is
a scheduler and a worker, which copies in small pieces and goes on when its scheduler has died, as a device does. A
block's bytes follow from its key and from the engine's epoch. With DISK, a folder, a disk tier lies below the pool.
"""

import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress

import numpy as np

from kvcache import ReqContext
from kvcache.node.client import NodeManager, greeting, register_worker
from kvcache.node.ledger import Ledger
from kvcache.node.protocol import node_folder

NUM_BLOCKS, BLOCK_BYTES, PIECE_BYTES = 384, 2048, 256
NUM_ENGINES, NUM_DOCUMENTS, MAX_LENGTH = 4, 40, 24
IDENTITY = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "block_size": 16, "model": "kills"}
COUNTS = "loaded", "stored", "wrong", "outages", "resets"
RESETS = 0.03


def key_of(document, place):
    return (document * 1000 + place + 1).to_bytes(36, "big")


def content_of(key):
    """Return the bytes of a block. `key` is that in the pool: after a reset it begins with the engine's epoch."""
    words = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return ((words + np.uint64(1)) * np.uint64(number | 1)).view(np.uint8)


def copy(target, source, dice):
    for first in range(0, BLOCK_BYTES, PIECE_BYTES):
        target[first : first + PIECE_BYTES] = source[first : first + PIECE_BYTES]
        if dice.random() < 0.02:
            time.sleep(0.0005)


def work(folder, link, hello, dice):
    """The worker: copy what the scheduler asks for, and count wrong bytes."""
    pool = register_worker(folder, hello, NUM_BLOCKS, BLOCK_BYTES).array
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    link.sendall(b"\n")
    for line in link.makefile("rb"):
        is_store, keys, slots = json.loads(line)
        wrong = 0
        for key, slot in zip(map(bytes.fromhex, keys), slots, strict=True):
            copy(*((pool[slot], content_of(key)) if is_store else (buffer, pool[slot])), dice)
            wrong += not is_store and not np.array_equal(buffer, content_of(key))
        link.sendall(b"%d\n" % wrong)


def look_up(manager, keys, context):
    """Return the leading blocks that are ready, after waiting for tiers and other writers, as a scheduler does."""
    while True:
        states = [manager.status(key, context) for key in keys]
        num_ready = next((i for i, state in enumerate(states) if state != 2), len(keys))
        if num_ready == len(keys) or states[num_ready] == 0:
            return num_ready
        manager.on_schedule_end()
        time.sleep(0.001)


def schedule(folder, name, counts, options, seed):
    """The scheduler: store and load documents until it is killed."""
    dice = random.Random(seed)
    link, other = socket.socketpair()
    parent = os.getppid()
    if os.fork() == 0:
        link.close()
        work(folder, other, greeting(name, IDENTITY, options, rank=0), dice)
        os._exit(0)
    other.close()
    answers = link.makefile("rb")
    answers.readline()
    manager = NodeManager(folder, greeting(name, IDENTITY, options, num_workers=1))

    def run(is_store, keys, spec):
        epoch = manager._link.hello["epoch"]
        keys = [epoch + key.hex()[len(epoch) :] for key in keys]
        link.sendall(json.dumps([is_store, keys, spec.block_ids.tolist()]).encode() + b"\n")
        if dice.random() < RESETS:
            # The copy runs on: its slots must not be written before it has ended.
            manager.reset_cache(dice.choice([None, "v1", "v2"]))
            counts[4] += 1
        return int(answers.readline())

    while os.getppid() == parent:
        # One in three is a new document, so that blocks are evicted and stored all the time.
        is_new = dice.random() < 0.3
        document = dice.randrange(1000, 10**6) if is_new else min(int(dice.expovariate(0.08)), NUM_DOCUMENTS - 1)
        keys = [key_of(document, place) for place in range(dice.randint(4, MAX_LENGTH))]
        context = ReqContext()
        context.set_offload_key_positions({key: 16 * (i + 1) for i, key in enumerate(keys)})
        hits = look_up(manager, keys, context)
        if hits:
            counts[2] += run(False, keys[:hits], manager.prepare_load(keys[:hits], context))
            counts[0] += hits
            manager.complete_load(keys[:hits], context)
        output = manager.prepare_store(keys[hits:], context) if hits < len(keys) else None
        ends_first = dice.random() < 0.5
        if ends_first:
            manager.on_request_finished(context, use_positions=True)
        if output is not None and output.keys_to_store:
            run(True, output.keys_to_store, output.store_spec)
            counts[1] += len(output.keys_to_store)
            manager.complete_store(output.keys_to_store, context, dice.random() > 0.02)
        if not ends_first:
            manager.on_request_finished(context, use_positions=True)
        if dice.random() < 0.5:
            manager.on_schedule_end()
        counts[3] = manager.parts()[1].stats.outages


def fault_of(folder, monitor):
    """All engines are dead: return what is still held, lost, named twice, or wrong in the pool, or ""."""
    end_s = time.monotonic() + 20
    figures = None
    while time.monotonic() < end_s:
        monitor.on_schedule_end()
        figures = monitor.owner_figures()
        if figures and not figures["num_referenced"] and not figures["num_pending"]:
            break
        time.sleep(0.02)
    if not figures or figures["num_referenced"] or figures["num_pending"]:
        return f"still held: {figures}"
    ledger = Ledger(folder / "ledger", NUM_BLOCKS, IDENTITY)
    ready = np.flatnonzero(ledger.state == 2).tolist()
    keys = ledger.keys_of(ready)
    pool = np.fromfile(folder / "pool", np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    wrong = sum(not np.array_equal(pool[slot], content_of(key)) for slot, key in zip(ready, keys, strict=True))
    fault = ""
    if len(ready) + figures["num_free"] != NUM_BLOCKS:
        fault = f"slots are lost: {len(ready)} ready, {figures['num_free']} free of {NUM_BLOCKS}"
    if wrong or len(set(keys)) < len(keys) or ledger.readers.any() or (ledger.state == 1).any():
        fault += f"; {wrong} wrong, {len(keys) - len(set(keys))} twice, {ledger.readers.any()} held in the ledger"
    return fault


class Node:
    """The engines and their owner, to be killed."""

    def __init__(self, name, disk):
        self.options = {"cache_policy": "lru"}
        if disk:
            tier = {"type": "disk", "path": disk, "capacity": "64MiB"}
            self.options |= {"tiers": [tier], "lookup_deadline_s": 1}
        self.folder = node_folder(name)
        self.monitor = NodeManager(self.folder, greeting("monitor", IDENTITY, self.options), patience_s=5)
        self.counts = np.frombuffer(mmap.mmap(-1, 8 * 8 * 4096), np.int64).reshape(-1, 8)
        self.engines = {}
        self.num_started = 0

    def start(self):
        self.num_started += 1
        number = self.num_started
        counts = self.counts[number % len(self.counts)]
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                schedule(self.folder, f"engine-{number}", counts, self.options, number)
            except (OSError, ValueError) as error:
                if not isinstance(error, ConnectionError | BrokenPipeError) and str(error):
                    print(f"engine {number}: {error}", file=sys.stderr)
            finally:
                os._exit(0)
        # Also here: a kill may come before the engine has done it.
        with suppress(OSError):
            os.setpgid(pid, pid)
        self.engines[pid] = number

    def kill(self, pid, with_worker=False):
        """Kill a scheduler alone, whose worker then goes on with its copy, or the whole engine."""
        (os.killpg if with_worker else os.kill)(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del self.engines[pid]

    def kill_all(self):
        for pid in list(self.engines):
            self.kill(pid)

    def wait_for_copies(self):
        """Wait until the engines have copied some blocks."""
        before, end_s = self.counts[:, :2].sum(), time.monotonic() + 5
        while self.counts[:, :2].sum() < before + 40 and time.monotonic() < end_s:
            time.sleep(0.005)

    def hit_owner(self, dice):
        """Kill the owner, or stop it for a moment."""
        self.monitor.on_schedule_end()
        figures = self.monitor.owner_figures()
        if figures is None:
            return False
        with_stop = dice.random() < 0.3
        os.kill(figures["pid"], signal.SIGSTOP if with_stop else signal.SIGKILL)
        if with_stop:
            time.sleep(dice.uniform(0.01, 0.2))
            os.kill(figures["pid"], signal.SIGCONT)
        return True


def main(name, engine_kills, owner_kills, disk=""):
    dice = random.Random(7)
    node = Node(name, disk)
    faults, done = [], [0, 0]
    total = int(engine_kills) + int(owner_kills)
    while sum(done) < total:
        while len(node.engines) < NUM_ENGINES:
            node.start()
        time.sleep(dice.uniform(0.01, 0.12))
        if dice.random() < 0.7:
            # Otherwise a kill may come before the last one is repaired.
            node.wait_for_copies()
        for pid in list(node.engines):
            # One whose worker could not start.
            if os.waitpid(pid, os.WNOHANG)[0]:
                del node.engines[pid]
        if dice.random() * total < int(owner_kills):
            done[1] += node.hit_owner(dice)
        elif len(node.engines) > 1:
            node.kill(dice.choice(list(node.engines)), dice.random() < 0.3)
            done[0] += 1
        if sum(done) % 100 == 99:
            node.kill_all()
            faults += filter(None, [fault_of(node.folder, node.monitor)])
    node.kill_all()
    faults += filter(None, [fault_of(node.folder, node.monitor)])
    figures = node.monitor.owner_figures()
    sums = dict(zip(COUNTS, node.counts.sum(0).tolist(), strict=False))
    os.kill(figures["pid"], signal.SIGKILL)
    shutil.rmtree(node.folder)
    print(json.dumps({"engine_kills": done[0], "owner_kills": done[1], **sums, "faults": faults}))
    return int(bool(faults or sums["wrong"] or not sums["loaded"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
