"""KVCacheStorage with disks that fail or are removed, and with other ranks."""

import random
import shutil
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import processes
import pytest
import torch
from host_pools import mamba, mha, mla
from local_stores import LocalValkey
from processes import TOKENS, load_right, prompt, running
from servers import find_valkey, free_port, running_valkey
from test_disk_failures import FAULTS, FailingCalls
from waiting import wait_until

from kvcache.integrations.sglang import storage

QUICK = {"deadline_s": 0.3, "pause_s": 0.05, "flush_interval_s": 0.02}


@pytest.fixture
def calls(monkeypatch):
    calls = FailingCalls(monkeypatch, random.Random(1))
    yield calls
    calls.clear()


@pytest.fixture
def extra(tmp_path):
    return {"kind": "disk", "path": str(tmp_path / "tier"), "capacity": "16MiB"}


def recover(engine, number):
    """Store and load until both work."""
    wait_until(lambda: (engine.store(prompt(number)), load_right(engine, number)) == (TOKENS, TOKENS))


def test_ranks_work_at_once(extra, tmp_path):
    with ExitStack() as stack:
        work = processes.work_as_rank
        pipes = [stack.enter_context(running(work, extra, rank))[1] for rank in range(2)]
        assert [pipe.recv() for pipe in pipes] == [0, 0]
        for pipe in pipes:
            pipe.send("go")
        assert [pipe.recv() for pipe in pipes] == [[TOKENS] * 40] * 2
    assert {path.name for path in (tmp_path / "tier").iterdir()} == {"tp0of2-kv", "tp1of2-kv"}
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 16 << 20


@pytest.mark.skipif(find_valkey() is None, reason="needs a Valkey or Redis server")
def test_latent_ranks_load_what_first_stores(engine):
    pytest.importorskip("valkey")
    with running_valkey() as port:
        extra = {"kind": "valkey", "url": f"valkey://127.0.0.1:{port}", "path": None, "capacity": None}
        with running(processes.write_latent, extra) as (_, pipe):
            assert pipe.recv() == TOKENS
            reader = engine({"kv": mla()}, extra=extra, rank=1, num_ranks=2)
            assert load_right(reader, 1) == TOKENS
            reader.store(prompt(2))
            assert load_right(reader, 2) == 0


def clear(*ranks):
    """Clear ranks at the same time, as SGLang asks them to."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        assert all(pool.map(lambda rank: rank.storage.clear(), ranks))


def test_latent_ranks_share_after_common_clear(engine, monkeypatch):
    pytest.importorskip("valkey")
    server = LocalValkey()
    extra = {"kind": "valkey", "url": server.url, "path": None, "capacity": None, "deadline_s": 1}

    def launch():
        store = torch.distributed.HashStore()
        monkeypatch.setattr(storage, "_launch_store", lambda: store)
        return [engine({"kv": mla()}, extra=extra, rank=rank, num_ranks=2) for rank in range(2)]

    # Keys of their own: a reader remembers for a while that a page was absent.
    first, reader = launch()
    clear(first, reader)
    assert [(first.store(prompt(n)), load_right(reader, n)) for n in (1, 2)] == [(TOKENS, TOKENS)] * 2
    # One that has missed a clear shares nothing more, also if it clears as often later.
    clear(first)
    assert (first.store(prompt(3)), load_right(first, 3)) == (TOKENS, TOKENS)
    clear(reader)
    assert [load_right(reader, n) for n in (1, 3)] == [0, 0]
    clear(first, reader)
    assert (first.store(prompt(4)), load_right(reader, 4)) == (TOKENS, TOKENS)
    # Another launch with the same store, as often cleared, has other weights.
    others = launch()
    for _ in range(3):
        clear(*others)
        assert [load_right(other, n) for other in others for n in range(1, 5)] == [0] * 8
    server.kill()


@pytest.mark.parametrize("name", FAULTS)
def test_failing_disk_serves_no_wrong_byte(engine, calls, name):
    broken, draw, num_loaded = engine(extra=QUICK), random.Random(name), 0
    calls.set(*FAULTS[name])
    end_s = time.monotonic() + 60
    for step in count():
        broken.store(prompt(draw.randrange(12)))
        num_loaded += load_right(broken, draw.randrange(12))
        if step > 40 and num_loaded and calls.num_faults:
            break
        assert time.monotonic() < end_s
    calls.clear()
    recover(broken, 20)


def test_removed_directory_raises_nothing(engine, tmp_path):
    removed = engine(extra=QUICK)
    recover(removed, 1)
    shutil.rmtree(tmp_path / "tier")
    wait_until(lambda: not load_right(removed, 1))
    assert removed.store(prompt(2)) == 0
    assert removed.storage.clear() is False


def test_replicas_have_folders_and_shares(engine, tmp_path, monkeypatch):
    parallel = type("Parallel", (), {"dp_rank": 0, "num_dp_ranks": 2})
    monkeypatch.setattr(storage, "get_parallel", lambda: parallel)
    first = engine()
    with pytest.raises(ValueError, match="is in use by process"):
        engine()
    parallel.dp_rank = 1
    second = engine()
    assert {path.name for path in (tmp_path / "tier").iterdir()} == {"kv", "dp1-kv"}
    assert [each.storage._stores["kv"].stats().tier.num_blocks >> 8 for each in (first, second)] == [1, 1]
    assert first.store(prompt(1)) == TOKENS
    assert load_right(second, 1) == 0
    own = engine(extra={"path": str(tmp_path / "{dp_rank}")})
    assert own.storage._stores["kv"].stats().tier.num_blocks >> 8 == 3
    assert (tmp_path / "1" / "kv").is_dir()


def test_exporters_show_pools_and_ranks(engine, tmp_path):
    pytest.importorskip("prometheus_client")
    port, num_pages = free_port(), processes.PAGES
    extra = {"exporters": [{"type": "prometheus", "port": port}], "path": str(tmp_path / "hybrid")}
    for rank in range(2):
        hybrid = engine({"kv": mha(), "mamba": mamba()}, extra=extra, rank=rank, num_ranks=2)
        assert (hybrid.store(prompt(rank)), load_right(hybrid, rank)) == (TOKENS, TOKENS)
        with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics") as response:
            loaded = [line.decode() for line in response if line.startswith(b"kvcache_tier_loaded_blocks_total{")]
        assert [f'rank="{rank}"' in line for line in loaded] == [True] * 2
        counts = {name: line.split()[-1] for name in ("kv", "mamba") for line in loaded if f'tier="{name}"' in line}
        assert counts == {"kv": f"{num_pages}.0", "mamba": "0.0"}
        stats = hybrid.storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([num_pages], [num_pages])
        assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
        assert hybrid.storage.get_stats().backup_pgs == []
