"""A manager over vLLM's shared region, vLLM's own or ours, driven as vLLM's scheduler drives it, without a device."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from waiting import wait_until

from kvcache.integrations.vllm import KVCacheOffloadingSpec, identity
from kvcache.integrations.vllm.tiered import EngineRegion

PAGE = 4096


def _engine_of_these_tests() -> Any:
    """Return the parts of a `VllmConfig` that a fingerprint reads; its model has no files."""
    model = {"model": "/model", "revision": None, "seed": 0, "dtype": "float32", "quantization": None}
    model |= {"disable_sliding_window": False, "multimodal_config": None, "max_model_len": 2048}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, hf_config=SimpleNamespace(to_diff_dict=dict)),
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]),
        lora_config=None,
        speculative_config=None,
    )


# A real engine's configuration is a local variable of its connector, which is found first.
identity.get_current_vllm_config_or_none = _engine_of_these_tests


def settle(manager: Any, step: Callable[[], Any] | None = None) -> None:
    """Step, as the scheduler does, until no transfer of a manager's tiers is under way."""

    def is_idle() -> bool:
        step() if step else manager.on_schedule_end(base.ScheduleEndContext([], []))
        return not manager.has_pending_work()

    wait_until(is_idle)


def key(number: int, group: int = 0) -> Any:
    """Return the key of block `number`."""
    return base.make_offload_key(number.to_bytes(32, "big"), group)


def keys(*numbers: int, group: int = 0) -> list[Any]:
    """Return the keys of blocks."""
    return [key(number, group) for number in numbers]


def engine_spec_config(
    extra_config: dict[str, Any],
    *,
    bytes_per_block: int = PAGE,
    num_groups: int = 1,
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    is_agnostic: bool = False,
    replicated: bool = False,
    enable_events: bool = True,
    model: str = "model",
) -> OffloadingConfig:
    """Return the configuration that vLLM makes for a spec."""
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer.{i}",), i) for i in range(num_groups)),
        worker_kv_bytes_per_block=bytes_per_block,
        enable_kv_cache_events=enable_events,
        extra_config=extra_config,
        engine_id=f"kvcache-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(model, "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(rank, tp * pp, tp, pp, 1, 1, 0, 1, None, is_agnostic),
        replicated_layout=replicated,
        kv_cache_layout="NHD",
    )


def tier_config(kind: str, **options: Any) -> dict[str, Any]:
    """Return an entry of ``secondary_tiers`` that names our tier."""
    return {"type": "KVCacheTier", "module_path": "kvcache.integrations.vllm", "kind": kind, **options}


class EngineTiering:
    """A manager with tiers, and the steps of vLLM's scheduler and worker.

    `tiers` are ``secondary_tiers``, and `policy` holds other keys of ``kv_connector_extra_config``; `config` is that of
    `engine_spec_config`. With `is_ours`, `tiers` are those of our manager over vLLM's region.
    """

    def __init__(
        self,
        tiers: list[dict[str, Any]],
        num_chunks: int = 16,
        policy: Any = None,
        is_ours: bool = False,
        **config: Any,
    ) -> None:
        num_bytes = config.get("bytes_per_block", PAGE) * config.get("tp", 1) * config.get("pp", 1)
        given = {"tiers": tiers, "data_plane": "vllm"} if is_ours else {"secondary_tiers": tiers}
        extra_config = {"cpu_bytes_to_use": num_chunks * num_bytes, **given, **(policy or {})}
        spec_type = KVCacheOffloadingSpec if is_ours else TieringOffloadingSpec
        self.spec: Any = spec_type(engine_spec_config(extra_config, **config))
        self.manager: Any = self.spec.get_manager()
        self.tiers = [] if is_ours else self.manager.secondary_tiers
        # Ours is mapped once more, as a worker maps it.
        self._region = EngineRegion(self.spec) if is_ours else None
        region = self.manager.primary_tier.get_kv_memoryview() if self._region is None else self._region.array
        self.view = np.asarray(region)
        self.events: list[Any] = []
        self.num_requests = 0

    @property
    def tier(self) -> Any:
        """The first secondary tier."""
        return self.tiers[0]

    @property
    def counters(self) -> Any:
        """The first tier's own counters."""
        return self.tier._controller.stats().tier

    def content(self, block: bytes) -> np.ndarray[Any, Any]:
        """Return the bytes of a block, which its key decides."""
        seed = int.from_bytes(block[-8:], "big")
        return np.random.default_rng(seed).integers(-128, 128, self.view.shape[1], dtype=np.int8)

    def request(self, blocks: Sequence[Any] = (), **fields: Any) -> Any:
        """Begin a request whose prompt consists of `blocks`."""
        self.num_requests += 1
        context = base.ReqContext(f"request-{self.num_requests}", **fields)
        if hasattr(context, "set_offload_key_position"):
            for position, one in enumerate(blocks):
                context.set_offload_key_position(one, 16 * (position + 1))
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step of the scheduler."""
        self.manager.on_schedule_end(base.ScheduleEndContext([], []))
        self.events += self.manager.take_events()

    def settle(self) -> None:
        """Step until no transfer is under way."""
        settle(self.manager, self.step)

    def store(self, blocks: Sequence[Any], context: Any = None) -> list[Any]:
        """Serve a request that computes `blocks`, by default a new one; return what host memory took."""
        context = context or self.request(blocks)
        output = self.manager.prepare_store(blocks, context)
        stored = [] if output is None else output.keys_to_store
        for one, chunk in zip(stored, [] if output is None else output.store_spec.chunk_ids, strict=True):
            self.view[chunk] = self.content(one)
        if stored:
            self.manager.complete_store(set(stored), context)
        self.manager.on_request_finished(context)
        self.step()
        return stored

    def write(self, *numbers: int) -> None:
        """Store blocks, all of which host memory takes, and wait until the tiers have ended."""
        assert self.store(keys(*numbers)) == keys(*numbers)
        self.settle()

    def find(self, blocks: Sequence[Any], context: Any) -> int:
        """Look `blocks` up until vLLM knows how many of the first can be loaded."""

        def looked_up() -> int | None:
            self.step()
            num_found, is_deferred = 0, False
            for one in blocks:
                match self.manager.lookup(one, context):
                    case base.LookupResult.HIT:
                        num_found += 1
                    case base.LookupResult.MISS:
                        break
                    case _:
                        is_deferred = True
                        num_found += 1
            self.step()
            return None if is_deferred else num_found + 1

        return wait_until(looked_up) - 1

    def load(self, blocks: Sequence[Any]) -> int:
        """Serve a request for `blocks`; check the bytes of those that are found and return their number."""
        context = self.request(blocks)
        num_found = self.find(blocks, context)
        if num_found:
            spec = self.manager.prepare_load(blocks[:num_found], context)
            for one, chunk in zip(blocks, spec.chunk_ids, strict=False):
                np.testing.assert_array_equal(self.view[chunk], self.content(one))
            self.manager.complete_load(set(blocks[:num_found]), context)
        self.manager.on_request_finished(context)
        self.step()
        return num_found

    def forget_host(self) -> None:
        """Drop the blocks of host memory, as a reset of the prefix cache does."""
        self.settle()
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()

    def close(self) -> None:
        """Shut the manager down, once."""
        if vars(self).pop("view", None) is None:
            return
        self.manager.shutdown()
        if self._region is not None:
            self._region.close()
