"""Host pools and controllers of SGLang on a CPU, over our storage backend."""

import json
import threading
from types import SimpleNamespace

import gpu_only  # noqa: F401  (before SGLang)
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 4
TOKENS = 64
CPU = torch.device("cpu")


def mha(
    layout="page_first", heads=2, dtype=torch.bfloat16, page_size=PAGE, num_layers=3, head_dim=8, num_tokens=TOKENS
):
    def rows():
        return tuple(torch.zeros(1, heads, head_dim, dtype=dtype) for _ in range(num_layers))

    pointers = torch.zeros(num_layers, dtype=torch.uint64)
    buffers = KVBuffers(k=rows(), v=rows(), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page_size,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
        device=CPU,
    )
    return made(
        *(MHATokenToKVPoolHost, info, 2, 0, page_size, layout),
        device_capacity_tokens=num_tokens,
        start_layer=0,
        end_layer=num_layers - 1,
    )


def mla(layout="page_first"):
    info = MLABufferInfo(
        buffers=tuple(torch.zeros(TOKENS, 1, 24, dtype=torch.bfloat16) for _ in range(3)),
        data_ptrs=torch.zeros(3, dtype=torch.uint64),
        layer_indices=(0, 1, 2),
        device_layer_num=3,
        page_size=PAGE,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return made(
        *(MLATokenToKVPoolHost, info, 2, 0, PAGE, layout),
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=2,
        target_layer_num=3,
    )


def mamba():
    info = MambaStateBufferInfo(temporal=torch.zeros(3, TOKENS, 5, 4), conv=(torch.zeros(3, TOKENS, 7, 2),))
    return made(MambaPoolHost, info, 2, 0, device_capacity=TOKENS, layout="page_first")


def made(cls, *arguments, **options):
    with host_memory_budget_scope(1 << 30):
        return cls(*arguments, pin_memory=False, **options)


class Engine:
    """A controller of SGLang over host pools; it stores and loads pages as the scheduler would."""

    def __init__(self, monkeypatch, pools, extra, model="org/m", rank=0, num_ranks=1, backend="dynamic"):
        names = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "dcp", "attn_dcp")
        sizes = {f"{name}_{part}": 1 if part == "size" else 0 for name in names for part in ("rank", "size")}
        parallel = SimpleNamespace(**{**sizes, "tp_rank": rank, "tp_size": num_ranks})
        for module in (cache_controller, hybrid_cache_controller):
            monkeypatch.setattr(module, "get_parallel", lambda: parallel, raising=False)
        monkeypatch.setattr(cache_controller, "is_dp_attention_enabled", lambda: False)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
        self.pools = pools
        kind = cache_controller.MLATokenToKVPool if isinstance(pools["kv"], MLATokenToKVPoolHost) else object
        device = type("Device", (kind,), {"__init__": lambda self: None, "register_layer_transfer_counter": len})()
        device.device, device.layer_num = "cpu", 3
        type(device).register_layer_transfer_counter = lambda self, counter: None
        allocator = SimpleNamespace(get_kvcache=lambda: device)
        arguments = {
            "token_to_kv_pool_allocator": allocator,
            "page_size": pools["kv"].page_size,
            "tp_group": object(),
            "load_cache_event": threading.Event(),
            "storage_backend": backend,
            "prefetch_threshold": 1,
            "model_name": model,
            "io_backend": "direct",
            "storage_backend_extra_config": {
                "backend_name": "kvcache",
                "module_path": "kvcache.integrations.sglang",
                "class_name": "KVCacheStorage",
                "interface_v1": 1,
                **{name: value for name, value in json.loads(json.dumps(extra)).items() if value is not None},
            },
        }
        if len(pools) == 1:
            self.controller = cache_controller.HiCacheController(mem_pool_host=pools["kv"], **arguments)
        else:
            entries = [
                PoolEntry(PoolName(name), pool, None, lambda layer: layer, is_primary_index_anchor=name == "kv")
                for name, pool in pools.items()
            ]
            self.controller = hybrid_cache_controller.HybridCacheController(
                mem_pool_host=HostPoolGroup(entries), **arguments
            )
        self.storage = self.controller.storage_backend

    def hashes(self, tokens):
        return hybrid_cache_controller.get_storage_hash_str(tokens, None, page_size=PAGE)

    def store(self, tokens, transfers=(), seed=0):
        """Back up the pages of `tokens`, filled with bytes of their own; return the tokens that were stored."""
        indices = self.pools["kv"].alloc(len(tokens))
        for number, start in enumerate(indices[::PAGE].tolist()):
            fill(self.pools["kv"], start, tokens[0] + seed + number)
        options = {"extra_pools": list(transfers)} if len(self.pools) > 1 else {}
        self.controller.write_storage(indices, tokens, hash_value=self.hashes(tokens), **options)
        operation = self.controller.ack_backup_queue.get(timeout=120)
        self.pools["kv"].free(indices)
        return operation.completed_tokens

    def load(self, tokens, transfers=()):
        """Prefetch `tokens`; return how many tokens came, and their pages."""
        options = {"extra_pools": list(transfers)} if len(self.pools) > 1 else {}
        self.controller.prefetch(SimpleNamespace(rid="r"), tokens, **options)
        operation = self.controller.prefetch_hit_queue.get(timeout=120)
        pool = self.pools["kv"]
        operation.host_indices = pool.alloc(max(PAGE, operation.storage_hit_count))
        for start in operation.host_indices[::PAGE].tolist():
            fill(pool, start, 0, 0)
        self.controller.prefetch_buffer.put(operation)
        num_tokens = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=120)
            num_tokens = max(num_tokens, ack.completed_tokens or 0)
            if ack.completed_req:
                break
        starts = operation.host_indices[:num_tokens:PAGE].tolist()
        pages = [page_of(pool, start).tolist() for start in starts]
        pool.free(operation.host_indices)
        return num_tokens, pages

    def flush(self):
        """Empty host memory, as SGLang's tree does when it is reset."""
        self.controller.reset()
        self.controller.mem_pool_host.clear()

    def close(self):
        self.controller.detach_storage_backend()


def page_of(pool, start):
    return pool.get_data_page(start, flat=True).contiguous().view(torch.uint8).clone()


def fill(pool, start, seed, most=256):
    page = pool.get_dummy_flat_data_page()
    noise = torch.Generator().manual_seed(seed)
    page.view(torch.uint8).copy_(torch.randint(0, max(1, most), (page.nbytes,), generator=noise, dtype=torch.uint8))
    pool.set_from_flat_data_page(start, page)
    return page.view(torch.uint8).tolist()
