"""LMCache's own factory, server and client over `KVCacheL2`."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from select import select

import numpy as np
from servers import free_port
from waiting import wait_until

os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

PLUGIN = {"module_path": "kvcache.integrations.lmcache", "class_name": "KVCacheL2"}


def object_key(number, model="org/m", salt="", rank=0x01000100, group=0):
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(b"%032d" % number, model, rank, group, salt)


def content(seed, num_bytes=1 << 18):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


class MemoryObject:
    """What an adapter uses of LMCache's memory objects."""

    def __init__(self, array):
        self.byte_array = memoryview(array).cast("B")


def answer(query, event_fd=-1, seconds=20):
    """Wait for the event, then for the result of a task, which is returned once."""
    if event_fd >= 0:
        assert select([event_fd], [], [], seconds)[0]
        os.eventfd_read(event_fd)
    result = wait_until(lambda: (result := query()) not in (None, {}) and [result])[0]
    assert query() in (None, {})
    return result


class Harness:
    """An adapter made by LMCache's factory, called as its controllers call it."""

    def __init__(self, path, capacity="24MiB", **params):
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        params = {"kind": "disk", "path": str(path), "capacity": capacity, **params}
        self.adapter = create_l2_adapter(PluginL2AdapterConfig(**PLUGIN, adapter_params=params))
        assert self.adapter.get_usage().total_bytes_used == 0  # no event without a name
        self.adapter.set_backend_identity("plugin")

    def store(self, arrays):
        """Store arrays by their keys; return LMCache's result."""
        task = self.adapter.submit_store_task(list(arrays), list(map(MemoryObject, arrays.values())))
        return answer(self.adapter.pop_completed_store_tasks, self.adapter.get_store_event_fd())[task]

    def look_up(self, keys):
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        event_fd = self.adapter.get_lookup_and_lock_event_fd()
        return answer(lambda: self.adapter.query_lookup_and_lock_result(task), event_fd).get_indices_list()

    def load(self, arrays):
        """Load, compare what came with `arrays`, and return the positions that came."""
        buffers = [np.zeros(len(array), np.uint8) for array in arrays.values()]
        task = self.adapter.submit_load_task(list(arrays), list(map(MemoryObject, buffers)))
        loaded = answer(lambda: self.adapter.query_load_result(task), self.adapter.get_load_event_fd())
        for array, buffer in [list(zip(arrays.values(), buffers, strict=True))[i] for i in loaded.get_indices_list()]:
            assert np.array_equal(array, buffer)
        return loaded.get_indices_list()

    def usage(self):
        usage = self.adapter.get_usage()
        assert usage.total_bytes_used == sum(usage.bytes_by_cache_salt.values()) <= usage.total_capacity_bytes
        return dict(usage.bytes_by_cache_salt)

    def keys(self, page_size=7, model=None):
        """Return all listed keys, page by page."""
        keys, cursor = [], None
        while True:
            page = self.adapter.list_l2_keys(model, page_size, cursor)
            keys += [entry.key.to_object_key() for entry in page.entries]
            if (cursor := page.next_page_token) is None:
                return keys


def store_and_delete(path):
    """Store objects of two sizes, delete every third, and print each step that is done; then wait to be killed."""
    l2 = Harness(path)
    for number in range(40):
        key = object_key(number, salt=str(number))
        assert l2.store({key: content(number, (1 << 18, 100_000)[number % 2])}).is_successful()
        print("stored", number, flush=True)
        if number % 3 == 0:
            l2.adapter.delete([key])
            print("deleted", number, flush=True)
    time.sleep(600)


class Server:
    """LMCache's server in a process of its own, and its bench client; chunks of 512 KiB."""

    def __init__(self, log, adapter):
        self.port, self.http = free_port(), free_port()
        options = {
            "--port": self.port,
            "--http-port": self.http,
            "--l1-size-gb": 0.25,
            "--eviction-policy": "LRU",
            "--chunk-size": 64,
            "--supported-transfer-mode": "engine_driven",
            "--l2-adapter": json.dumps(adapter),
        }
        flat = [str(part) for option in options.items() for part in option]
        flags = ["--host", "127.0.0.1", "--http-host", "127.0.0.1", "--no-l1-use-lazy", "--disable-observability"]
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", *flags, *flat]
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        end_s = time.monotonic() + 60
        while True:
            try:
                self.status()
                break
            except OSError:
                assert (self.process.poll(), time.monotonic() < end_s) == (None, True), log.read_text()[-2000:]
                time.sleep(0.2)
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        urls = f"tcp://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.http}"
        shape = "(2,256,16,8,64):float16:4"
        config = BenchConfig(*urls, "cpu", "engine_driven", 1, False, 512, shape, 256, 16)
        self.client = ServerBenchClient(config, lambda text: None)
        self.client.start()

    def status(self, path="/status", **request):
        url = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", **request)
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.loads(response.read())

    def adapter(self):
        return self.status()["storage_manager"]["l2_adapters"][0]

    def settle(self, num_objects):
        """Wait until the adapter holds so many objects of 512 KiB, then empty LMCache's own memory."""
        wait_until(lambda: self.adapter().get("sizes", {}).get("524288", {}).get("num_held") == num_objects)
        self.status("/cache/clear", method="POST", data=b"{}", headers={"content-type": "application/json"})

    def ask(self, sequence, name):
        """Look a prompt up and retrieve it; return its hits, and the checksums of what came into zeroed memory."""
        request = self.client.create_request(sequence, name, "ask")
        hits = self.client.lookup(request).hit_chunks
        self.client.zero_destination(request, 0, request.num_full_tokens)
        if hits:
            assert self.client.retrieve(request, 0, hits * 64).succeeded
        self.client.end_session(request)
        return hits, self.client.compute_checksums(request, 0, hits * 64) or []

    def store(self, sequence, name):
        """Store a prompt of 8 objects and return its checksums."""
        request = self.client.create_request(sequence, name, "store")
        checksums = self.client.compute_checksums(request, 0, request.num_full_tokens)
        assert self.client.store(request, 0, request.num_full_tokens).succeeded
        self.client.end_session(request)
        return checksums

    def stop(self, kill=False):
        (self.process.kill if kill else self.process.terminate)()
        self.process.wait(30)
