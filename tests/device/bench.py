"""A KV cache, a pool and two handlers on a device; on the simulated one, also checks for races and synchronisation."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager

import simulated
import torch

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import host_block_bytes
from kvcache.transfer.host_pool import HostPool

LATE = simulated.loaded
DEVICE = torch.device("late" if LATE else "cuda", 0)
NUM_LAYERS = 4
NUM_BLOCKS = 32
PAGE_BYTES = 512 if LATE else 32 << 10
# Layer i uses so many bytes of a page less per layer: padding must stay as it is.
STEP = 16
STAGING_BYTES = 9 * NUM_LAYERS * PAGE_BYTES
# How much of the queued work runs early: nothing, some, most.
EAGERNESS = (0.0, 0.3, 0.7)


def layer_bytes(layer: int) -> int:
    return PAGE_BYTES - STEP * layer


PART_BYTES = sum(map(layer_bytes, range(NUM_LAYERS)))


def spec_of(device_ids, host_ids, first_index=0):
    return GPULoadStoreSpec(device_ids, [len(device_ids)], [first_index]), CPULoadStoreSpec(host_ids)


def kv_caches_of(layers, page_bytes):
    """Return one group of tensors; `page_bytes` are the bytes that each one uses of a page."""
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(layer, layer.shape[1]) for layer in layers],
        [[CanonicalKVCacheRef(i, n) for i, n in enumerate(page_bytes)]],
    )


ALL = spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2))
# Two jobs without a block in common.
OUT = spec_of(range(NUM_BLOCKS // 2), range(NUM_BLOCKS // 4))
BACK = spec_of(range(NUM_BLOCKS // 2, NUM_BLOCKS), range(NUM_BLOCKS // 4, NUM_BLOCKS // 2))[::-1]


class Bench(AbstractContextManager):
    """One test's memory and handlers; on the simulated device, a race or a lost block fails the test at the end."""

    def __init__(self, seed: int) -> None:
        if LATE:
            LATE.reset(seed, EAGERNESS[seed % len(EAGERNESS)])
        torch.manual_seed(seed)
        self.layers = [
            torch.randint(-128, 128, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8).to(DEVICE) for _ in range(NUM_LAYERS)
        ]
        self.kv_caches = kv_caches_of(self.layers, map(layer_bytes, range(NUM_LAYERS)))
        self.pool = HostPool(NUM_BLOCKS // 2, host_block_bytes(self.kv_caches, 2), pin=True)
        self.store, self.load = self.handlers()
        torch.accelerator.synchronize()

    def handlers(self, staging_bytes=STAGING_BYTES):
        """Make two more handlers."""
        return cpu_gpu_handlers(self.kv_caches, self.pool, 2, staging_bytes=staging_bytes)

    def __exit__(self, *error) -> None:
        race = LATE.race().decode() if LATE else ""
        self.store.shutdown()
        self.load.shutdown()
        torch.accelerator.synchronize()
        self.pool.close()
        if LATE:
            LATE.reset(0, 0.0)
        assert not race or error[0] is not None, race

    # --- the engine ---

    def fill(self, value) -> None:
        """Queue a kernel on the current stream that writes to all layers."""
        for layer in self.layers:
            layer.fill_(value)

    def read_host(self):
        """Return the pool's blocks, (host blocks, device blocks in it, bytes)."""
        return self._touched(False).view(NUM_BLOCKS // 2, 2, PART_BYTES)

    def fill_host(self, value, blocks=slice(None)) -> None:
        self._touched(True)[blocks] = value

    def _touched(self, writes):
        if LATE:
            LATE.host_touch(self.pool.address, self.pool.num_bytes, writes)
        return self.pool.tensor

    def read_block(self, block_id):
        """Return one host block; other blocks may be written meanwhile."""
        if LATE:
            LATE.host_touch(self.pool.address + block_id * self.pool.stride_bytes, self.pool.block_bytes, False)
        return self.pool.block(block_id).view(2, PART_BYTES)

    def read_layers(self):
        """Return the bytes of all device blocks as host blocks hold them, (device blocks, bytes)."""
        return torch.cat([layer.cpu()[:, : layer_bytes(i)] for i, layer in enumerate(self.layers)], 1)


def finish(handler, job_id):
    handler.wait([job_id])
    (result,) = handler.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    assert result.transfer_time >= 0
    return result


def poll(handler):
    for _ in range(100_000):
        if results := handler.get_finished():
            return results
    raise AssertionError("polling does not end")


def keep_busy(steps=50) -> None:
    """Queue work on the current stream that takes a while."""
    if LATE:
        LATE.sleep(steps)
    else:
        torch.cuda._sleep(steps * 1_000_000)


def new_stream():
    """Return a stream that starts after the work of the current one."""
    stream = torch.Stream(device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream(DEVICE))
    return stream


@contextmanager
def no_synchronisation():
    """Fail if the host waits for the device."""
    if LATE:
        before = LATE.syncs()
        yield
        assert LATE.syncs() == before, "the host waited for the device"
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
