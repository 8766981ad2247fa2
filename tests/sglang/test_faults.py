"""KVCacheStorage with killed processes, disks that fail, hang or are removed, other ranks and other models."""

import random
import shutil
import time
import urllib.request
from contextlib import ExitStack
from itertools import count

import processes
import pytest
from host_pools import PAGE, mamba, mha, mla
from processes import expected, prompt, running
from test_disk_failures import FAULTS, FailingCalls

from kvcache.integrations.sglang import storage
from kvcache.lab.bench.servers import find_valkey, free_port, running_valkey

TOKENS = PAGE * processes.PAGES
QUICK = {"deadline_s": 0.3, "advanced": {"pause_s": 0.05, "flush_interval_s": 0.02}}


def load_right(engine, number):
    """Load a prompt, compare its pages, and return how many tokens came."""
    num_tokens, pages = engine.load(prompt(number))
    assert pages == expected(engine, number)[: len(pages)]
    return num_tokens


@pytest.fixture
def calls(monkeypatch):
    calls = FailingCalls(monkeypatch, random.Random(1))
    yield calls
    calls.clear()


def recover(engine, number):
    """Store and load until both work again."""
    end_s = time.monotonic() + 60
    while (engine.store(prompt(number)), load_right(engine, number)) != (TOKENS, TOKENS):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_killed_writer_leaves_whole_pages(engine, tmp_path):
    extra = {"kind": "disk", "path": str(tmp_path / "tier"), "capacity": "16MiB"}
    draw, last = random.Random(1), -1
    for _ in range(4):
        with running(processes.write, extra, last + 1) as (process, pipe):
            target = last + draw.randrange(5, 40)
            while last < target:
                last = pipe.recv()
            process.kill()
            process.join()
            # Stores that ended before the signal came.
            while pipe.poll():
                try:
                    last = pipe.recv()
                except EOFError:
                    break
        reader = engine(extra=extra)
        assert [load_right(reader, number) for number in range(last + 1)] == [TOKENS] * (last + 1)
        load_right(reader, last + 1)
        stats = reader.storage._stores["kv"].stats().tier
        assert stats.corrupt_blocks == 0
        reader.close()


def test_ranks_work_at_once(tmp_path):
    extra = {"kind": "disk", "path": str(tmp_path / "tier"), "capacity": "16MiB"}
    with ExitStack() as stack:
        work = processes.work_as_rank
        pipes = [stack.enter_context(running(work, extra, rank))[1] for rank in range(2)]
        assert [pipe.recv() for pipe in pipes] == ["open"] * 2
        for pipe in pipes:
            pipe.send("go")
        assert [pipe.recv() for pipe in pipes] == [20 * TOKENS] * 2


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
            # Both ranks clear, as SGLang asks them to, and share what is stored then.
            assert reader.storage.clear()
            pipe.send("clear")
            assert pipe.recv()
            assert pipe.recv() == TOKENS
            assert load_right(reader, 1) == TOKENS


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


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_hanging_disk_leaves_pool_alone(engine, calls, operation, interface_v1):
    hanging = engine(extra={"interface_v1": interface_v1, **QUICK})
    pool, stats = hanging.pools["kv"], hanging.storage._stores["kv"].stats
    recover(hanging, 1)
    calls.set(f"{operation} 1 hang")
    assert (load_right(hanging, 1) if operation == "read" else hanging.store(prompt(2))) == 0
    assert stats().stuck_blocks
    # SGLang uses its pages again while the disk still has the job.
    pool.kv_buffer.fill_(7)
    calls.clear()
    end_s = time.monotonic() + 60
    while stats().stuck_blocks:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert (pool.kv_buffer == 7).all()
    assert load_right(hanging, 2) in (0, TOKENS)
    for number in (1, 2, 3):
        recover(hanging, number)


def test_file_limit_fails_stores_only(tmp_path):
    extra = {"kind": "disk", "path": str(tmp_path / "tier"), "capacity": "1MiB", "advanced": QUICK["advanced"]}
    with running(processes.fill_disk, extra) as (_, pipe):
        stored, loaded = pipe.recv()
    assert 0 < len(stored) < 20
    assert set(stored) <= set(loaded)


def test_removed_directory_raises_nothing(engine, tmp_path):
    removed = engine(extra=QUICK)
    recover(removed, 1)
    shutil.rmtree(tmp_path / "tier")
    end_s = time.monotonic() + 20
    while load_right(removed, 1):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert removed.store(prompt(2)) == 0
    assert removed.storage.clear() is False


def test_clear_leaves_other_models(engine, tmp_path):
    models = [engine(model=name, extra={"path": str(tmp_path / name)}) for name in ("a", "b")]
    assert [model.store(prompt(1)) for model in models] == [TOKENS] * 2
    assert models[0].storage.clear()
    for _ in range(2):
        assert [load_right(model, 1) for model in models] == [0, TOKENS]
        for model in models:
            model.close()
        models = [engine(model=name, extra={"path": str(tmp_path / name)}) for name in ("a", "b")]


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
    placed = engine(extra={"path": str(tmp_path / "{dp_rank}")})
    assert (tmp_path / "1" / "kv").is_dir()
    assert placed.store(prompt(1)) == TOKENS
    assert second.load(prompt(1))[0] == 0


def test_exporters_show_pools_and_ranks(engine, tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    extra = {"exporters": [{"type": "prometheus", "port": port}], "path": str(tmp_path / "hybrid")}
    engines = [engine({"kv": mha(), "mamba": mamba()}, extra=extra, rank=rank, num_ranks=2) for rank in range(2)]
    for rank, each in enumerate(engines):
        assert each.store(prompt(rank)) == TOKENS
        assert load_right(each, rank) == TOKENS
        with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics") as response:
            lines = response.read().decode().splitlines()
        (loaded,) = [line for line in lines if line.startswith("kvcache_tier_loaded_blocks_total{") and '"kv"' in line]
        assert f'rank="{rank}"' in loaded
        assert loaded.endswith(f" {processes.PAGES}.0")
        assert any('tier="mamba"' in line for line in lines)
        stats = each.storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([processes.PAGES], [processes.PAGES])
        assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
        assert each.storage.get_stats().backup_pgs == []
