"""SGLang's kit for its unified radix cache, with our storage backend in the place of `HiCacheFile`.

The kit, in SGLang's wheel, is fixtures and checks. No package has SGLang's tests that call them, so the tests are ours:
they drive each fixture that has a storage backend, and run over `HiCacheFile`, too, as the baseline.
"""

from __future__ import annotations

import json
import os
from array import array
from functools import partial
from typing import Any
from unittest import TestCase, mock

import pytest
import sglang_cpu  # noqa: F401  (before SGLang)
import torch
from local_stores import LocalValkey
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import fixtures, mixins, storage
from sglang.test.kits.unified_radix_cache.config import CONFIGS, supports_hicache
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.load_back import UnifiedRadixCacheLoadBackFixtures

PLACE = os.environ["PEERS_PLACE"]
TESTS = (__file__, "--noconftest")
PASSES = {"0.5.23": 95}
EXCLUDED: dict[str, str] = {}
REQUEST = CacheRequestHandle("request", 0)
fixtures.get_device = lambda: "cpu"


class Kit(
    storage.AnchorLockOutcomePolicyFixtures,
    storage.UnifiedRadixCacheStorageAttachBackfillFixtures,
    UnifiedRadixCacheLoadBackFixtures,
    TestCase,
):
    """All of SGLang's fixtures that can have a storage backend, for one configuration."""

    __test__ = False
    _REQ = REQUEST

    def __init__(self, cfg: Any, layout: str) -> None:
        super().__init__("run")
        self.cfg = cfg
        self._layout = layout
        self._engines: list[Any] = []
        self._server: LocalValkey | None = None
        patch = mock.patch.object(mixins, "ServerArgs", self._server_args)
        patch.start()
        self.addCleanup(patch.stop)
        self.folder = self._make_storage_dir()

    def backend(self, extra: str | None) -> tuple[str, str | None]:
        """Return the name and the extra config of the storage backend that is tested."""
        if PLACE == "HiCacheFile":
            return "file", extra
        config = {"backend_name": "kvcache", "module_path": "kvcache.integrations.sglang", "interface_v1": 1}
        if PLACE == "valkey":
            if self._server is None:
                self._server = LocalValkey()
                self.addCleanup(self._server.kill)
            config |= {"kind": "valkey", "url": self._server.url}
        else:
            config |= {"kind": "disk", "path": self.folder, "capacity": "64MiB", "preallocate": False}
        return "dynamic", json.dumps({**config, "class_name": "KVCacheStorage", **json.loads(extra or "{}")})

    def _server_args(self, **options: Any) -> ServerArgs:
        if options.get("hicache_storage_backend"):
            name, extra = self.backend(options["hicache_storage_backend_extra_config"])
            options |= {"hicache_storage_backend": name, "hicache_storage_backend_extra_config": extra}
        return ServerArgs(**{**options, "hicache_io_backend": "direct", "hicache_mem_layout": self._layout})

    def _init_hicache(self, cache: Any, **options: Any) -> None:
        if PLACE == "disk":
            # One engine at a time may have a directory.
            for engine in self._engines:
                assert engine.detach_storage_backend()[0]
        self._engines.append(cache)
        super()._init_hicache(cache, **options)
        self.addCleanup(cache.detach_storage_backend)

    def values(self, num_tokens: int) -> torch.Tensor:
        """Return a marker that differs from token to token."""
        return (torch.arange(num_tokens) % 251).view(-1, 1, 1).bfloat16()

    def load(self, cache: Any, allocator: Any, tokens: list[int]) -> tuple[int, Any]:
        """Prefetch a prompt into the cache; return the length of the hit and the values of its tokens."""
        self._consume_prefetch(cache, tokens, REQUEST)
        found = match_prefix(cache, tokens)
        if found.host_hit_length:
            self._load_back_node(cache, found.last_host_node)
            found = match_prefix(cache, tokens)
        indices = cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        return found.device_prefix_len, self._snapshot_full_kv(allocator, indices)


@pytest.fixture
def kit(request):
    kit = Kit(*request.param)
    yield kit
    kit.doCleanups()


def configurations(is_wanted: Any = lambda cfg: True, layout: str = "page_first_direct") -> Any:
    """Run a test for the kit's configurations with pools of at most 1024 tokens; larger ones would take minutes."""
    small = [cfg for cfg in CONFIGS if supports_hicache(cfg) and cfg.kv_size <= 1024]
    params = [pytest.param((cfg, layout), id=cfg.label) for cfg in small if is_wanted(cfg)]
    return pytest.mark.parametrize("kit", params, indirect=True)


def is_full(cfg: Any) -> bool:
    return not cfg.has_mamba and not cfg.has_swa


def has_long_window(cfg: Any) -> bool:
    return cfg.has_swa and cfg.sliding_window_size > cfg.page_size


def equal(values: Any, others: Any) -> bool:
    return all(map(torch.equal, values, others))


@configurations()
def test_stored_prefix_loads_equal(kit):
    check_stored_prefix(kit)


@configurations(lambda cfg: not cfg.has_mamba, "layer_first")
def test_stored_layers_load_equal(kit):
    check_stored_prefix(kit)


def check_stored_prefix(kit):
    tokens = kit._buffer_swa_seq()
    expected = kit._l3_produce(kit.folder, tokens, marker=kit.values(len(tokens)))
    cache, allocator, _ = kit._l3_consumer(kit.folder)
    num_loaded, values = kit.load(cache, allocator, tokens + kit._make_seq(9000, 2))
    assert (num_loaded, equal(values, expected)) == (len(tokens), True)


@configurations(lambda cfg: cfg.has_mamba)
def test_mamba_states_load_equal(kit):
    tokens = kit._make_seq(1, 3)
    cache, allocator, states = kit._l3_consumer(kit.folder)
    kit._insert(cache, allocator, states, tokens)
    leaf = match_prefix(cache, tokens).last_device_node
    slots = node_device_value(cache, leaf, ComponentType.MAMBA)
    kit._fill_mamba_state(states, slots, 5)
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)
    cache, allocator, others = kit._l3_consumer(kit.folder)
    assert kit.load(cache, allocator, tokens)[0] == len(tokens)
    loaded = node_device_value(cache, match_prefix(cache, tokens).last_device_node, ComponentType.MAMBA)
    (temporal, conv), (expected, expected_conv) = (
        kit._snapshot_mamba_state(pool, indices) for pool, indices in ((others, loaded), (states, slots))
    )
    assert equal([temporal, *conv], [expected, *expected_conv])
    # A prefix is a hit if its last page has a state.
    keys = kit._all_page_hashes(cache, match_prefix(cache, tokens).last_device_node)
    trailing = partial(PoolTransfer, name=PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    counts = [kit._storage_exists_count(cache, keys[:n], [trailing(keys=keys[n - 1 : n])]) for n in (2, 3)]
    assert counts == [0, 3]


@configurations(lambda cfg: not cfg.has_mamba)
def test_buffer_mode_loads_equal(kit):
    tokens = kit._buffer_swa_seq()
    _, expected = kit._produce_buffer_l3(kit.folder, tokens, marker=kit.values(len(tokens)))
    cache, allocator, _ = kit._build_buffer_hicache_fixture(kit.folder)
    sizes = kit._host_avail_sizes(cache)
    num_loaded, values = kit.load(cache, allocator, tokens)
    assert (num_loaded, equal(values, expected)) == (len(tokens), True)
    assert kit._host_avail_sizes(cache) == sizes
    leaf = match_prefix(cache, tokens).last_device_node
    keys = kit._all_page_hashes(cache, leaf)
    assert kit._storage_exists_count(cache, keys, storage.aux_storage_key_transfers(cache, leaf)) == len(keys)


@configurations(lambda cfg: cfg.has_swa)
def test_masked_pages_are_reused(kit):
    tokens = kit._buffer_swa_seq()
    kit._produce_buffer_l3(kit.folder, tokens)
    # If the window has several pages, the device still holds the last one.
    kit._assert_masked_full_is_reused(kit.folder, tokens, kit.cfg.page_size * has_long_window(kit.cfg))


@configurations(lambda cfg: not cfg.has_mamba)
def test_siblings_head_is_trimmed(kit):
    kit._assert_sibling_head_is_trimmed(kit.folder, kit._buffer_swa_seq(), False)


@configurations(has_long_window)
def test_window_outlives_trimmed_head(kit):
    num_pages = -(-kit.cfg.sliding_window_size // kit.cfg.page_size)
    kit._assert_sibling_head_is_trimmed(kit.folder, kit._make_seq(1, num_pages), True)


@configurations(lambda cfg: cfg.has_swa)
@pytest.mark.parametrize("is_missing", [False, True])
def test_window_needs_all_ranks(kit, is_missing):
    folder, tokens = kit._setup_swa_tp_prefetch()
    cache, _, _ = kit._l3_consumer(folder)
    kit._patch_tp_prefetch_sync(cache, is_missing)
    kit._consume_prefetch(cache, tokens, REQUEST)
    assert kit._swa_host_on_path(cache, tokens) is not is_missing


@configurations(lambda cfg: not cfg.has_mamba and cfg.page_size == 4)
def test_salts_share_no_pages(kit):
    tokens = kit._buffer_swa_seq()
    kit._produce_buffer_l3(kit.folder, tokens, cache_salt="a")
    cache, _, _ = kit._build_buffer_hicache_fixture(kit.folder)
    for salt, is_hit in (("b", False), ("a", True)):
        request = CacheRequestHandle(salt, 0)
        root = cache.root_node_handle()
        cache.prefetch_from_storage(request, root, array("q", tokens), None, None, cache_salt=salt)
        kit._pump_hicache_until(cache, partial(cache.check_prefetch_progress, request), "no end")
        assert cache.buffer_pipeline.has_staged(request) is is_hit


@configurations(is_full)
def test_late_pool_stores_pages(kit):
    component = {ComponentType.FULL: storage.ExtraPoolFullComponent}
    cache, allocator, states = fixtures.build_fixture(kit.cfg, component_registry_override=component)
    # A pool that comes after the tiers were opened needs a share.
    kit._init_buffer_hicache(cache, kit.folder, storage_extra={"shares": {"kv": 0.5, "draft": 0.5}})
    tokens, draft = kit._make_seq(1, 4), storage.ExtraPoolFullComponent.EXTRA_POOL
    kit._insert(cache, allocator, states, tokens)
    leaf = match_prefix(cache, tokens).last_device_node
    controller = cache.cache_controller
    with mock.patch.object(controller, "write_storage", wraps=controller.write_storage) as write:
        kit._buffer_backup_and_wait(cache, leaf)
    keys = kit._all_page_hashes(cache, leaf)
    kv_writes, draft_writes = kit._writes_by_pool(write, draft)
    assert [key for part in kv_writes for key in part] == keys
    assert sorted(key for part in draft_writes for key in part) == sorted(keys)
    transfer = PoolTransfer(name=draft, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert kit._storage_exists_count(cache, keys, [transfer]) == len(keys)


@configurations(is_full)
def test_rest_loads_behind_prefix(kit):
    tokens, size = kit._make_seq(1, 4), kit.cfg.page_size
    kit._PREFIX = tokens[:size]
    _, expected = kit._produce_buffer_l3(kit.folder, tokens, marker=kit.values(len(tokens)))
    cache, pipeline = kit._make_buffer_cache(kit._PREFIX, storage_dir=kit.folder)
    node = match_prefix(cache, kit._PREFIX).last_device_node
    last = cache.tree_core.get_last_hash_value(node)
    rest = array("q", tokens[size:])
    cache.prefetch_from_storage(REQUEST, node, rest, last, None, matched_prefix_tokens=kit._PREFIX)
    kit._run_prefetch_to_completion(cache, REQUEST)
    leaf = match_prefix(cache, tokens)
    assert leaf.device_prefix_len == len(tokens)
    indices = cache.path_device_indices(leaf.last_device_node)[size:]
    values = kit._snapshot_full_kv(cache.token_to_kv_pool_allocator, indices)
    assert equal(values, [value[size:] for value in expected])
    assert not pipeline.anchor_locks


@configurations(is_full)
def test_late_attach_finds_hashes(kit):
    kit.prefix_tokens, kit.suffix_tokens = array("q", kit._make_seq(1, 2)), array("q", kit._make_seq(900, 2))
    expected = kit._hashes_by_token_ids(kit._build_two_level_tree(storage_on_from_the_start=True))
    cache = kit._build_two_level_tree(storage_on_from_the_start=False)
    kit._init_hicache(cache)
    assert set(kit._hashes_by_token_ids(cache).values()) == {None}
    parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    directory = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(kit.folder)
    with parallel, directory:
        assert cache.attach_storage_backend(*kit.backend(None)) == (True, mock.ANY)
    assert kit._hashes_by_token_ids(cache) == expected


@configurations(lambda cfg: not cfg.has_mamba)
def test_cleared_pages_are_written_again(kit):
    tokens = kit._buffer_swa_seq()
    cache, allocator, states = kit._build_buffer_hicache_fixture(kit.folder)
    kit._insert(cache, allocator, states, tokens)
    leaf = match_prefix(cache, tokens).last_device_node
    kit._buffer_backup_and_wait(cache, leaf)
    keys = kit._all_page_hashes(cache, leaf)
    assert kit._storage_exists_count(cache, keys) == len(keys)
    # As if the tier had evicted them: SGLang believes that they are stored until a look-up misses.
    cache.cache_controller.storage_backend.clear()
    kit._consume_prefetch(cache, tokens, REQUEST)
    kit._buffer_backup_and_wait(cache, leaf)
    assert kit._storage_exists_count(cache, keys) == len(keys)


@configurations(lambda cfg: cfg.page_size == 4)
@pytest.mark.parametrize("attempt", range(3))
def test_failures_serve_no_wrong_page(kit, attempt):
    tokens = kit._buffer_swa_seq(8)
    expected = kit._l3_produce(kit.folder, tokens, marker=kit.values(len(tokens)))
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.5):
        cache, allocator, _ = kit._l3_consumer(kit.folder)
    num_loaded, values = kit.load(cache, allocator, tokens)
    assert equal(values, [value[:num_loaded] for value in expected])
