"""KVCacheStorage under SGLang's own controllers: pages come back byte-equal, or not at all."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_pools import PAGE, fill, mamba, mha, mla, page_of
from local_stores import LocalValkey
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvcache.integrations.sglang import storage
from kvcache.integrations.sglang.pages import HostPages
from kvcache.integrations.sglang.settings import POOL_NAMES
from kvcache.tiers.disk.maintenance import inspect_tier
from kvcache.tiers.disk.tier import DiskTier

TOKENS = list(range(1, 1 + 6 * PAGE))
KINDS = {
    "mha": mha,
    "layer_first": lambda: mha("layer_first"),
    "direct": lambda: mha("page_first_direct"),
    "head": lambda: mha("page_head"),
    "flat": lambda: vars(pool := mha()).update(get_page_buffer_meta=None) or pool,  # without addresses of pages
    "mla": mla,
    "mla_layer_first": lambda: mla("layer_first"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_pages_survive_a_restart(engine, kind, interface_v1):
    extra = {"interface_v1": interface_v1}
    first = engine({"kv": KINDS[kind]()}, extra=extra)
    assert first.load(TOKENS)[0] == 0
    assert first.store(TOKENS) == len(TOKENS)
    num_tokens, pages = first.load(TOKENS)
    assert num_tokens == len(TOKENS)
    assert pages == [fill(first.pools["kv"], 0, TOKENS[0] + i) for i in range(6)]
    first.close()
    second = engine({"kv": KINDS[kind]()}, extra={"interface_v1": 1 - interface_v1})
    assert second.load(TOKENS) == (num_tokens, pages)
    assert second.storage.get_stats().prefetch_pgs == [6]
    assert second.storage.clear()
    assert second.load(TOKENS)[0] == 0


def test_pages_belong_to_weight_version(engine, monkeypatch):
    serving = SimpleNamespace(weight_version="default")
    monkeypatch.setattr(storage, "get_serving", lambda: serving)
    first = engine()
    assert (first.store(TOKENS), first.load(TOKENS)[0]) == (len(TOKENS), len(TOKENS))
    # SGLang records the version after an update, and does not call its storage.
    serving.weight_version = "step-1"
    assert first.load(TOKENS)[0] == 0
    first.flush()
    assert (first.store(TOKENS), first.load(TOKENS)[0]) == (len(TOKENS), len(TOKENS))
    first.close()
    for version, option, num_tokens in (
        ("step-1", None, len(TOKENS)), ("default", "step-1", len(TOKENS)), ("step-2", None, 0), ("default", None, 0)
    ):  # fmt: skip
        serving.weight_version = version
        later = engine(extra={"weights_version": option})
        assert (later.load(TOKENS)[0], version) == (num_tokens, version)
        later.close()


def test_pages_belong_to_model_options(engine, monkeypatch, tmp_path):
    options = SimpleNamespace(**storage._IMPLIED)
    monkeypatch.setattr(storage, "get_model", lambda: options)
    first = engine()
    # An earlier release of kvcache knew none of them: the fingerprint is the same without.
    assert not storage._IMPLIED.keys() & inspect_tier(tmp_path / "tier" / "kv").fingerprint.keys()
    first.close()
    for name in ("json_model_override_args", "quantization", "revision"):
        with monkeypatch.context() as patch:
            patch.setattr(options, name, "other")
            with pytest.raises(ValueError, match=name):
                engine()


@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_waiting_pages_get_no_later_name(engine, monkeypatch, is_noticed):
    """SGLang names new weights before it empties host memory, from which a thread may still back up old pages."""
    serving = SimpleNamespace(weight_version="step-1")
    monkeypatch.setattr(storage, "get_serving", lambda: serving)
    first = engine({"kv": mha(), "mamba": mamba()} if is_noticed else None)
    assert first.store(TOKENS) == len(TOKENS)
    serving.weight_version = "step-2"
    if is_noticed:
        assert first.load(TOKENS)[0] == 0
    assert first.store(TOKENS) == 0
    first.flush()
    assert first.load(TOKENS)[0] == 0
    assert (first.store(TOKENS), first.load(TOKENS)[0]) == (len(TOKENS), len(TOKENS))
    pools = list(first.pools.values())
    first.close()
    assert not any("clear" in vars(pool) for pool in pools)


@pytest.mark.parametrize("make", [*KINDS.values(), mamba], ids=[*KINDS, "mamba"])
def test_parts_are_the_flat_page(make):
    pool = make()
    host = HostPages(pool)
    starts = [2 * host.page_size, 5 * host.page_size]
    pages = [fill(pool, start, 7 + start) for start in starts]
    indices = torch.tensor([start + i for start in starts for i in range(host.page_size)])
    for parts, page in zip(host.buffers(indices, 2), pages, strict=True):
        assert b"".join(map(bytes, parts)) == bytes(page)
    with pytest.raises(ValueError, match="pages need"):
        host.buffers(indices[1:], 2)


def files(path, name):
    return sorted(Path(path).rglob(name))


def test_damaged_and_swapped_files_are_misses(engine, tmp_path):
    first = engine()
    assert first.store(TOKENS) == len(TOKENS)
    first.close()
    (data,) = files(tmp_path / "tier", "*data*")
    blocks = bytearray(data.read_bytes())
    blocks[:8192] = blocks[4096:8192] + blocks[:4096]  # the first two pages change places
    blocks[2 * 4096 + 5] ^= 1
    data.write_bytes(blocks)
    second = engine()
    keys = second.hashes(TOKENS)
    indices = torch.arange(len(TOKENS))
    answers = second.storage.batch_get_v1(keys, indices)
    assert sum(answers) == 3
    for i, answer in enumerate(answers):
        if answer:
            assert page_of(second.pools["kv"], i * PAGE).tolist() == fill(mha(), 0, TOKENS[0] + i)
    assert second.store(TOKENS) == len(TOKENS)
    assert second.load(TOKENS)[0] == len(TOKENS)


@pytest.mark.parametrize(
    ("pool", "model"),
    [
        (lambda: mha(dtype=torch.float16), "org/m"),
        (lambda: mha("page_first_direct"), "org/m"),
        (lambda: mha(heads=4), "org/m"),
        (mha, "org-m"),
    ],
    ids=["dtype", "layout", "heads", "model"],
)
def test_another_form_is_refused(engine, pool, model):
    engine().close()
    with pytest.raises(ValueError, match=r"fingerprint|block"):
        engine({"kv": pool()}, model=model)


def test_latent_model_needs_a_shared_store(engine):
    with pytest.raises(ValueError, match=r"all 2 ranks .* 'valkey' or 'mooncake'"):
        engine({"kv": mla()}, rank=0, num_ranks=2)


def test_hybrid_pools_and_hit_policies(engine):
    pools = {"kv": mha(), "mamba": mamba(), "swa": mha(heads=1)}
    hybrid = engine(pools)
    storage, keys = hybrid.storage, hybrid.hashes(TOKENS)

    def states(name, some):
        size = pools[name].page_size
        slots = [PAGE * keys.index(key) + i for key in some for i in range(size)]
        return PoolTransfer(PoolName(name), host_indices=torch.tensor(slots), keys=some)

    for key in keys:
        fill(pools["mamba"], PAGE * keys.index(key), 50 + keys.index(key))
    mine = [states("mamba", [keys[1], keys[4]]), states("swa", keys[:5])]
    assert hybrid.store(TOKENS, mine) == len(TOKENS)
    trailing = PoolTransfer(PoolName.MAMBA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    everything = PoolTransfer(PoolName.SWA, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
    result = storage.batch_exists_v2(keys, [trailing])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [2, 5])
    result = storage.batch_exists_v2(keys, [trailing, everything])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (5, {"kv": 6, "mamba": 5, "swa": 5})
    window = PoolTransfer(PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert storage.batch_exists_v2(keys, [window]).restorable_prefix_pages == [1, 2, 3, 4, 5]
    assert storage.batch_exists_v2(["00" * 32], [trailing]).kv_hit_pages == 0
    page = page_of(pools["mamba"], PAGE * 4)
    fill(pools["mamba"], PAGE * 4, 0)
    assert storage.batch_get_v2([states("mamba", [keys[4], keys[0]])]) == {"mamba": [True, False]}
    assert torch.equal(page_of(pools["mamba"], PAGE * 4), page)
    assert storage.get_stats().prefetch_pgs == []
    other = [number + 1000 for number in TOKENS]
    assert hybrid.store(other) == len(other)
    assert storage.batch_exists_v2(hybrid.hashes(other), [trailing]).kv_hit_pages == 0
    assert storage.batch_exists(keys) == 6
    with pytest.raises(ValueError, match="name its share"):
        storage.register_mem_host_pool_v2(mha(), PoolName.DRAFT)
    hybrid.close()
    assert storage.batch_get_v2([states("mamba", keys[:1])]) == {"mamba": [False]}
    with pytest.raises(ValueError, match=r"fingerprint|block"):
        engine({**pools, "swa": mha(heads=2)})
    # Its other pools are closed.
    again = engine(pools)
    assert again.storage.batch_exists_v2(keys, [trailing, everything]) == result


def test_latent_ranks_keep_own_states(engine):
    pytest.importorskip("valkey")
    server = LocalValkey()
    extra = {"kind": "valkey", "url": server.url, "path": None, "capacity": None}
    for rank in range(2):
        storage = engine({"kv": mla(), "mamba": mamba()}, extra=extra, rank=rank, num_ranks=2).storage
    # The first rank stores latent values for all.
    assert storage.batch_set_v1(["a"], torch.arange(PAGE)) == [True]
    state = PoolTransfer(PoolName.MAMBA, keys=["a"], host_indices=torch.tensor([0]))
    assert storage.batch_set_v2([state]) == {"mamba": [True]}
    assert (storage.exists("a"), storage.batch_get_v2([state])) == (False, {"mamba": [True]})
    # One namespace for the latent values of both, and one for the states of each.
    assert sum(name.endswith(b":epoch") for name in server.values) == 3
    server.kill()


def test_untaken_statistics_are_bounded(engine):
    storage = engine().storage
    storage.batch_set_v1(["a"], torch.arange(PAGE))
    for _ in range(1100):
        storage.batch_get_v1(["a"], torch.arange(PAGE))
    assert len(storage.get_stats().prefetch_pgs) == 1024


def test_hot_pages_survive_a_restart(engine):
    extra = {"capacity": DiskTier.capacity_for(12, 4096)}
    first = engine(extra=extra)
    prompts = [[1000 * n + i for i in range(4 * PAGE)] for n in range(1, 6)]
    assert all(first.store(prompt) for prompt in prompts[:2])
    assert first.load(prompts[0])[0] == 4 * PAGE
    first.close()
    second = engine(extra=extra)
    assert all(second.store(prompt) for prompt in prompts[2:4])
    assert second.load(prompts[1])[0] == 0
    assert second.load(prompts[0])[0] == 4 * PAGE


def test_nothing_raises_into_sglangs_threads(engine):
    first = engine()
    storage, keys = first.storage, first.hashes(TOKENS)
    assert storage.batch_set_v1(keys, torch.arange(3)) == [False] * 6
    assert storage.get("x") is None
    page = page_of(first.pools["kv"], 0)
    assert storage.set("x", page)
    assert storage.exists("x")
    assert torch.equal(storage.get("x", torch.zeros_like(page)), page)
    assert storage.set("y", page[1:]) is False
    assert storage.set("AB" * 32, page)
    assert not storage.exists("ab" * 32)
    assert storage.batch_get_v2([PoolTransfer(PoolName.DRAFT, keys=["a"])]) == {"draft": [False]}


def test_pool_names_are_those_of_sglang():
    names = {name.value for name in PoolName}
    assert {name for name in names if not name.startswith("deepseek_v4_")} == set(POOL_NAMES)
