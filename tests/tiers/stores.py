"""Real stores on loopback, a proxy that spoils what passes through it, and jobs that are run to their end."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
from local_stores import Spawned
from servers import find_valkey, free_port, wait_for_port
from waiting import wait_until

from kvcache.testing.tier_contract import TierContract
from kvcache.tiers.base.job_tier import TierBatch

VALKEY_BINARY = find_valkey()
# As in `kvcache.tiers.shared_store`, which needs packages that other users of this file do not.
SEAL_BYTES = 16
KEYS = [bytes([number]) * 36 for number in range(1, 65)]
T = TypeVar("T")


class MooncakeStore:
    """A master, and nodes that lend it memory."""

    def __init__(self, folder):
        self.port = free_port()
        self.master = f"127.0.0.1:{self.port}"
        self.place = {"master": self.master, "timeout_s": 1.0, "soft_pin": True, "soft_pin_ttl_s": 60.0}
        self._metrics_port = free_port()
        self._log = (folder / "store.log").open("ab")
        self._processes = []
        self.start_master()

    def start_master(self):
        self.process = self._start(
            "mooncake_master",
            f"-rpc_port={self.port}",
            "-rpc_address=127.0.0.1",
            f"-metrics_port={self._metrics_port}",
            "-enable_metric_reporting=false",
            "-default_kv_lease_ttl=200",
        )
        self.pid = self.process.pid
        wait_for_port(self.port)

    def start_node(self, size="64MB"):
        return self._start(
            "mooncake_client",
            f"-master_server_address={self.master}",
            "-metadata_server=P2PHANDSHAKE",
            "-host=127.0.0.1",
            f"-port={free_port()}",
            f"-global_segment_size={size}",
        )

    def wait_for_memory(self):
        """Wait until a node has lent its memory to the master."""
        end_s = time.monotonic() + 60
        while b"\nmaster_total_capacity_bytes 0\n" in self._metrics():
            assert time.monotonic() < end_s, "no node has lent memory within 60 s"
            time.sleep(0.1)

    def _metrics(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=60) as answer:
            return answer.read()

    def kill_master(self):
        self.process.kill()
        self.process.wait()

    def _start(self, name, *options):
        binary = shutil.which(name) or str(Path(sys.executable).parent / name)
        process = subprocess.Popen([binary, *options], stdout=self._log, stderr=self._log)
        self._processes.append(process)
        return process

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()

    kill = close


def set_credentials(monkeypatch):
    """Give this process credentials for a local bucket, and no other place for it."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


class MotoServer:
    """moto's S3 with one bucket, in a process of its own."""

    def __init__(self, bucket):
        self.port = free_port()
        self.place = {"bucket": bucket, "endpoint": f"http://127.0.0.1:{self.port}"}
        code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([sys.executable, "-c", code], **streams)
        wait_for_port(self.port)
        self.make_bucket()

    @property
    def pid(self):
        return self._process.pid

    def make_bucket(self):
        self._call("PUT", self.place["bucket"], b"")

    def remove_bucket(self):
        # moto's own door; its S3 keeps a bucket that is not empty.
        self._call("POST", "moto-api/reset", b"")

    def _call(self, method, path, body):
        request = urllib.request.Request(f"{self.place['endpoint']}/{path}", data=body, method=method)
        with urllib.request.urlopen(request, timeout=60):
            pass

    def kill(self):
        self._process.kill()
        self._process.wait()


def pause(pid):
    """Stop a process, and return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.001)


def resume(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


class Proxy(Spawned):
    """A TCP proxy that spoils what the server answers, as its mode says.

    ``"pass"``; ``"garbage"``; ``"cut"``: half an answer, then the end; ``"swallow"``: no answer; ``"half-open"``:
    nothing goes either way, and no connection ends; ``"drip"``: a byte a second. A client may keep the interpreter's
    lock while it connects, so the proxy is a process of its own.
    """

    def __init__(self, port):
        super().__init__(_run_proxy, port)
        self.port = self.greeting

    def set_mode(self, mode):
        """Choose how answers are spoilt; ``"cut"`` also ends all connections."""
        self.pipe.send(mode)
        self.pipe.recv()


def _run_proxy(pipe, port):
    mode, writers = "pass", set()

    async def pump(reader, writer, is_answer):
        writers.add(writer)
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if mode == "half-open" or (is_answer and mode == "swallow"):
                    continue
                if is_answer and mode == "cut":
                    writer.write(data[: len(data) // 2])
                    break
                if is_answer and mode == "garbage":
                    data = os.urandom(len(data))
                while is_answer and mode == "drip" and len(data) > 1 and not writer.is_closing():
                    writer.write(data[:1])
                    data = data[1:]
                    await asyncio.sleep(1.0)
                writer.write(data)
                await writer.drain()
        writers.discard(writer)
        # The other direction ends, too.
        writer.close()

    async def serve(reader, writer):
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, server, False), pump(answers, writer, True))

    def switch():
        nonlocal mode
        mode = pipe.recv()
        for writer in list(writers) if mode == "cut" else ():
            writer.transport.abort()
        pipe.send(True)

    async def run():
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        asyncio.get_running_loop().add_reader(pipe.fileno(), switch)
        pipe.send(listener.sockets[0].getsockname()[1])
        await listener.serve_forever()

    asyncio.run(run())


class Impostor:
    """A server of another protocol: it greets each client and closes the connection."""

    def __init__(self, greeting, port=0):
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self._greeting = greeting
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self):
        while True:
            try:
                client, _ = self._listener.accept()
                with client:
                    client.sendall(self._greeting)
                    client.recv(1 << 16)
            except OSError:
                if self._listener.fileno() < 0:
                    return

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def blocks(num_blocks=64, block_bytes=4096):
    return np.zeros((num_blocks, block_bytes), np.uint8)


def in_order(result, keys):
    """Sort a result's keys as they were submitted: several threads move a job's blocks."""
    result.done.sort(key=keys.index)
    result.failed.sort(key=keys.index)
    return result


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def until(condition, what="it"):
    """Call `condition` until its answer counts as true, and return that."""
    return wait_until(condition, what=what)


def wait_for(tier, job_id):
    return until(lambda: [result for result in tier.get_finished() if result.job_id == job_id], f"job {job_id}")[0]


def wait_for_reset(tier):
    until(lambda: tier.get_finished() == [] and not tier.stats().unavailable_reason.startswith(("opening", "reset")))


def found(tier, keys):
    def ask():
        tier.get_finished()
        answer = tier.lookup(keys)
        return [] if answer is None else [answer]

    return until(ask, "an answer to a look-up")[0]


def store_as_is(tier, keys, job_id=1):
    assert tier.submit_store(job_id, keys, list(range(len(keys)))), tier.stats()
    return in_order(wait_for(tier, job_id), keys)


def load_as_is(tier, keys, job_id=2):
    assert tier.submit_load(job_id, keys, list(range(len(keys)))), tier.stats()
    return in_order(wait_for(tier, job_id), keys)


def payload(key, num_bytes):
    """Return the bytes of the block that a key stands for."""
    return np.random.default_rng(list(key)).integers(0, 256, num_bytes, np.uint8)


def store(tier, keys, job_id=1):
    """Store blocks whose bytes follow from their keys."""
    for row, key in zip(tier._pool, keys, strict=False):
        row[:] = payload(key, len(row))
    return store_as_is(tier, keys, job_id)


def store_until_done(tier, keys):
    """Store keys once the store has memory and answers."""
    end_s, job_id = time.monotonic() + 60, 1 << 20
    while (result := store(tier, keys, job_id)).failed or result.error:
        assert time.monotonic() < end_s, (result, tier.stats())
        job_id += 1
        time.sleep(0.05)


def load(tier, keys, job_id=2):
    """Load blocks; every one that is said to be right is compared."""
    host = tier._pool
    host[:] = 0
    result = load_as_is(tier, keys, job_id)
    for i, key in enumerate(keys):
        assert key not in result.done or np.array_equal(host[i], payload(key, len(host[i]))), key
    assert not host[len(keys) :].any(), "a block of no job was touched"
    return result


def put(tier, name, seal, row=0):
    """Put a row of a tier under a name of a store, which may be another tier's, in the place of its value."""
    tier.delete_values([name])
    batch = TierBatch(0, False, [b"a key of no block"], [row], None, None, tier.generation, tier.host_rows)
    tier.put_values([name], batch, lambda _: seal)


class StoreContract(TierContract):
    """The contract of a tier whose blocks are those of every engine of the store at `place`."""

    evicts = False
    is_bounded = False
    survives_restart = True
    overwrites = True

    def open_tier(self, path, host_blocks, num_blocks):
        return self.tier_type.from_config(self.options(path, num_blocks), host_blocks, {})

    def options(self, path, num_blocks):
        return self.place | {"salt": str(path)}

    def test_epoch_is_replaced_on_request_only(self, opened, tmp_path):
        opened.append(self.open_tier(tmp_path, blocks(), 0))
        store_until_done(opened[0], KEYS[:1])
        epoch, other = opened[0].epoch, "0123456789abcdef"
        for replaces, expected in ((False, epoch), (True, other)):
            opened[0].announce_epoch(other, replaces)
            assert opened[0].read_epoch() == expected

    @pytest.mark.parametrize("deletes", [True, False])
    def test_damaged_values_are_misses(self, opened, tmp_path, caplog, deletes):
        """They are deleted, or else stored again."""
        for num_bytes in (4096, 1, 4096 - SEAL_BYTES, 4095, 4095, 4097, 4097):
            host = blocks(len(KEYS), num_bytes)
            opened.append(self.tier_type.from_config(self.options(tmp_path, 0), host, {"model": "m"}))
        tier, *others = opened
        store_until_done(tier, KEYS[:14])
        names, rows, seal = [tier.store_name(key) for key in KEYS[:14]], tier.host_rows, tier._namespace.seal
        good = [seal(name, row.tobytes()) for name, row in zip(names[:10], rows, strict=False)]
        for i, other in enumerate(others):
            wait_for_reset(other)
            # As much as fits of a right value, whether its seal comes first or last.
            start, end = (good[i], rows[i].tobytes()) if i % 2 else (rows[i].tobytes(), good[i])
            value, size = start + end + b"x", other.block_bytes
            other.host_rows[0] = np.frombuffer(value[len(start) % 4096 :][:size], np.uint8)
            put(other, names[i], value[:SEAL_BYTES] if i % 2 else value[size:][:SEAL_BYTES])
        put(tier, names[6], good[7], 7)
        rows[7, 100] ^= 1
        put(tier, names[7], good[7], 7)
        put(tier, names[8], bytes([good[8][0] ^ 1]) + good[8][1:], 8)
        tier.delete_values([names[9]])
        if not deletes:
            tier.delete_values = Mock(side_effect=RuntimeError("read-only"))
        result = load(tier, KEYS[:14])
        assert (result.error, result.done, result.failed) == ("", KEYS[10:14], KEYS[:10])
        assert (tier.stats().corrupt_blocks, tier.stats().missed_blocks) == (9, 1)
        assert tier.are_held(names) == [not deletes] * 9 + [False] + [True] * 4
        assert ("read-only" in caplog.text) != deletes
        if not self.overwrites:
            tier.__dict__.pop("delete_values", None)
        store_until_done(tier, KEYS[:14])
        assert load(tier, KEYS[:14], 3).done == KEYS[:14]

    def test_second_engine_finds_firsts_blocks(self, opened, tmp_path):
        host, options = blocks(), self.options(tmp_path, 0)

        def open_engine(model="m", **others):
            opened.append(self.tier_type.from_config(options | others, host, {"model": model}))

        for others in ({}, {}, {"model": "other"}, {"salt": "another tenant"}):
            open_engine(**others)
        first, second, *strangers = opened
        store_until_done(first, KEYS)
        # What the second engine offers is there: nothing is sent, and the job names none of it.
        result = store(second, KEYS[:8])
        assert (result.done, result.failed, second.stats().stored_blocks) == ([], [], 0)
        assert found(second, KEYS) == len(KEYS)
        assert load(second, KEYS).done == KEYS
        assert [found(stranger, KEYS[:4]) for stranger in strangers] == [0, 0]
        second.reset()
        wait_for_reset(second)
        store_until_done(second, KEYS[:2])
        store_until_done(second, [b"of second alone"])
        # A later engine has the weights of its fingerprint, as the first one has.
        open_engine()
        assert found(opened[-1], KEYS) == found(first, KEYS) == len(KEYS)
        assert [found(engine, [b"of second alone"]) for engine in opened] == [0, 1, *[0] * 3]
