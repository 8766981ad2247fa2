"""Time a scheduler's calls in the process and over a node's owner, in turns, against an echo between two processes.

Run as ``python -m asv_benchmarks.node_echo [ROUNDS]`` on an idle machine; prints medians in microseconds, and shares
of two bounds: a prompt of 512 hits, 3 times the calls in the process and one echo of the same bytes; 16 stores of one
block, which are 16 messages, 10 times those in the process and 64 echoes. Then 8 engines load prompts in turns: p99,
and the owner's CPU time.
"""

import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.node.client import NodeManager, greeting

NUM_KEYS, NUM_BLOCKS, KEY_BYTES = 512, 8192, 36
IDENTITY = {"num_blocks": NUM_BLOCKS, "block_bytes": 64, "block_size": 16}


def prompt(number, length):
    keys = [(number * 1000 + place).to_bytes(KEY_BYTES, "big") for place in range(length)]
    context = ReqContext()
    context.set_offload_key_positions({key: 16 * (place + 1) for place, key in enumerate(keys)})
    return keys, context


def load(manager, number):
    """Serve a prompt whose blocks are all found; return the seconds."""
    keys, context = prompt(number, NUM_KEYS)
    start_s = time.perf_counter()
    states = [manager.status(key, context) for key in keys] if isinstance(manager, NodeManager) else [
        manager.status(key) for key in keys
    ]  # fmt: skip
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)
    manager.on_request_finished(context, use_positions=True)
    manager.on_schedule_end()
    seconds = time.perf_counter() - start_s
    assert states == [2] * NUM_KEYS
    return seconds


def store(manager, number):
    """Store a new block of each of 16 requests, in one step; return the seconds."""
    requests = [prompt(number * 16 + i, 1) for i in range(16)]
    start_s = time.perf_counter()
    for keys, context in requests:
        assert manager.prepare_store(keys, context).keys_to_store == keys
        manager.reorder(context)
    manager.on_schedule_end()
    for keys, context in requests:
        manager.complete_store(keys, context)
        manager.on_request_finished(context, use_positions=True)
    manager.on_schedule_end()
    return time.perf_counter() - start_s


def echo(link, num_bytes):
    """Send bytes to another process, and wait for two bytes a key; return the seconds."""
    data = bytes(num_bytes)
    start_s = time.perf_counter()
    link.sendall(num_bytes.to_bytes(4, "little") + data)
    num_left = num_bytes
    while num_left:
        num_left -= len(link.recv(1 << 18))
    return time.perf_counter() - start_s


def serve_echoes(link):
    while head := link.recv(4, socket.MSG_WAITALL):
        link.sendall(link.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))


def load_in_turns(folder, owner, rounds):
    """Let 8 engines load a prompt each in turns; print the median, p99 and the owner's CPU time of a prompt."""
    schedstat = Path(f"/proc/{owner}/schedstat")
    engines = [
        NodeManager(folder, greeting(f"engine {i}", IDENTITY, {"cache_policy": "lru"}), patience_s=5) for i in range(8)
    ]
    start_ns = int(schedstat.read_text().split()[0])
    seconds = [load(engine, 1) for _ in range(rounds) for engine in engines]
    engines[-1].owner_figures()
    cpu_us = (int(schedstat.read_text().split()[0]) - start_ns) / len(seconds) / 1e3
    median, p99 = statistics.median(seconds) * 1e6, statistics.quantiles(seconds, n=100)[-1] * 1e6
    print(f"8 engines: median {median:.0f} us, p99 {p99:.0f} us, {p99 / median:.1f} times; owner {cpu_us:.0f} us CPU")
    for engine in engines:
        engine.shutdown()


def main(rounds=300):
    link, other = socket.socketpair()
    if os.fork() == 0:
        link.close()
        serve_echoes(other)
        os._exit(0)
    other.close()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node = NodeManager(Path(folder), greeting("engine", IDENTITY, {"cache_policy": "lru"}), patience_s=5)
        alone = CPUOffloadingManager(16, NUM_BLOCKS)
        for manager in (alone, node):
            keys, context = prompt(1, NUM_KEYS)
            manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)
        times = {
            name: [] for name in ("load alone", "load node", "echo load", "store alone", "store node", "echo store")
        }
        for number in range(int(rounds)):
            times["load alone"].append(load(alone, 1))
            times["load node"].append(load(node, 1))
            node.owner_figures()
            times["echo load"].append(echo(link, NUM_KEYS * KEY_BYTES))
            times["store alone"].append(store(alone, number + 1000))
            times["store node"].append(store(node, number + 1000))
            node.owner_figures()
            times["echo store"].append(echo(link, KEY_BYTES + 16))
        figures = node.owner_figures()
        load_in_turns(Path(folder), figures["pid"], int(rounds))
        node.shutdown()
        os.kill(figures["pid"], signal.SIGTERM)
        time.sleep(0.5)
    medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:<12} {value:8.0f} us")
    for what, num_echoes, factor in (("load", 1, 3), ("store", 64, 10)):
        bound = factor * medians[f"{what} alone"] + num_echoes * medians[f"echo {what}"]
        print(f"{what}: {medians[f'{what} node'] / bound:.2f} of the bound of {bound:.0f} us")
    link.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
