"""Stand-ins for what SGLang's host pools and its test kit need on GPUs; imported before SGLang."""

import atexit
import gc
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("sglang", "tiers"))

import gpu_only  # noqa: F401  (before SGLang)
import torch
from sglang.srt.mem_cache.pool_host import mamba, mha
from sglang.srt.mem_cache.pool_host.base import HostKVCache


def copy_layers(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for pages, layer in zip(src_ptrs, dst_ptrs, strict=True):
        layer[dst_indices] = pages[src_indices // page_size, layer_id, src_indices % page_size]


def back_up_layers(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for number, layer in enumerate(src_ptrs):
        pages = dst_ptrs[number // num_layers]
        pages[dst_indices // page_size, number % num_layers, dst_indices % page_size] = layer[src_indices]


def unpinned(init):
    return lambda self, *arguments, **options: init(self, *arguments, **{**options, "pin_memory": False})


for module in (mha, mamba):
    module.transfer_kv_direct = copy_layers
    module.transfer_kv_per_layer_direct_pf_lf = load_layer
    module.transfer_kv_all_layer_direct_lf_pf = back_up_layers
for pool in (HostKVCache, mamba.MambaPoolHost):
    pool.__init__ = unpinned(pool.__init__)
# Threads would only delay the kit's many small copies. SGLang collects garbage for each tree, so leave imports out.
torch.set_num_threads(1)
gc.freeze()
atexit.register(gc.unfreeze)
