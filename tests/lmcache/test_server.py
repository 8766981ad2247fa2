"""KVCacheL2 under LMCache's real server with its own client: restarts, kills, damage, a full disk, colliding names."""

import resource
import shutil
import time
import urllib.request

import numpy as np
import pytest
from l2_harness import PLUGIN
from servers import free_port
from waiting import wait_until


@pytest.mark.parametrize("kill", [False, True])
def test_server_serves_whole_objects_after_restarts(serve, tmp_path, monkeypatch, kill):
    port = free_port()
    exporter = {"type": "prometheus", "port": port}
    params = {"kind": "disk", "path": str(tmp_path / "l2"), "capacity": "24MiB", "exporters": [exporter]}
    params |= {"pause_s": 0.05, "flush_interval_s": 0.05}
    adapter = {"type": "plugin", **PLUGIN, "adapter_params": params}
    adapter["eviction"] = {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1}
    server = serve(adapter)
    names = ["org/m", "org-SEP-m"]
    helpers = "lmcache.cli.commands.bench.server_bench.helpers._MODEL_NAME"
    checksums = {}
    for number, name in enumerate(names):
        monkeypatch.setattr(helpers, name)
        server.client.close()
        server.client.start()
        for worker in server.client._workers:
            for tensor in worker.kv_caches.values():
                tensor.mul_(number + 1)
        checksums[name] = server.store(1, f"{name} stores")
        server.settle(8 * (number + 1))
    assert checksums[names[0]] != checksums[names[1]]

    def ask_all(server, attempt):
        answers = {}
        for name in names:
            monkeypatch.setattr(helpers, name)
            server.client.close()
            server.client.start()
            answers[name] = server.ask(1, f"{name} asks {attempt}")
        return answers

    expected = {name: (8, checksums[name]) for name in names}
    assert ask_all(server, "at once") == expected
    server.stop(kill)
    server = serve(adapter)
    eviction = server.status()["storage_manager"]["l2_eviction_controller"]["adapters"][0]
    assert eviction["total_bytes_used"] == 8 << 20
    assert ask_all(server, "after a restart") == expected
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    assert "kvcache_tier_loaded_blocks_total{" in text
    assert 'tier="524288"' in text
    data = np.memmap(tmp_path / "l2" / "objects-524288" / "data", np.uint8, "r+")
    data[::4096] ^= 1
    data.flush()
    server.status("/cache/clear", method="POST", data=b"{}", headers={"content-type": "application/json"})
    assert ask_all(server, "of damaged objects") == {name: (0, []) for name in names}
    assert server.adapter()["sizes"]["524288"]["corrupt_blocks"] > 0

    def fail_and_go_on(name, number):
        server.store(number, name)
        wait_until(lambda: not server.adapter()["is_healthy"])
        server.status("/cache/clear", method="POST", data=b"{}", headers={"content-type": "application/json"})

    # Writes past the first two slots fail with EFBIG; then what was damaged is stored again.
    server.client.close()
    server.client.start()
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    fail_and_go_on("full", 1)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    end_s = time.monotonic() + 60
    while server.adapter()["sizes"]["524288"]["num_held"] != 8:
        # The disk writes nothing in the pause after a failure, and LMCache stores a block only once.
        assert time.monotonic() < end_s, server.adapter()
        server.status("/cache/clear", method="POST", data=b"{}", headers={"content-type": "application/json"})
        again = server.store(1, "again")
        time.sleep(0.5)
    server.settle(8)
    assert server.ask(1, "stored again") == (8, again)
    shutil.rmtree(tmp_path / "l2")
    fail_and_go_on("removed", 2)
    assert server.ask(1, "removed") == (0, [])
