"""The keys of ``kv_connector_extra_config`` that vLLM reads itself, checked as strictly as our own.

vLLM finds a bad one only after it has loaded the weights, or takes it for something else: ``bool("no")`` is true.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcache.integrations.vllm import settings
from kvcache.options import choice_of

_DEFAULT_BLOCK = 16
_DEVICES = ("nvidia*", "dxg", "kfd", "dri/renderD*")
"""Device files of CUDA (also under WSL), ROCm and XPU."""
NO_DEVICE = (
    "vLLM's own manager copies on CUDA, ROCm and XPU only, and this machine shows no such device; on a CPU, use "
    f"spec_name {settings.SPEC_NAME!r} with spec_module_path {settings.__package__!r}"
)


def engine_faults(extra_config: Mapping[str, Any], engine_block: object) -> Iterator[tuple[str, str]]:
    """Yield the level and text of each key that vLLM would refuse or misread; `engine_block` is its ``block_size``."""
    is_engine_spec = settings.is_engine_spec(extra_config)
    keys = settings.EngineSpecKeys if is_engine_spec else settings.EngineKeys
    # The other options are ours: vLLM does not read them.
    values = {name: extra_config[name] for name in keys.declared() if name in extra_config}
    for name in values:
        try:
            keys.parse({name: values[name]})
        except ValueError as error:
            yield "error", str(error)
    tokens = values.get("block_size")
    if tokens is not None and values.get("blocks_per_chunk") is not None:
        yield "error", f"{settings.WHERE} may have one of 'block_size' and 'blocks_per_chunk', it has both"
    elif type(tokens) is int and tokens > 0:
        known = engine_block if type(engine_block) is int and engine_block > 0 else None
        if tokens % (known or _DEFAULT_BLOCK):
            of = f"{known}" if known else f"--block-size of vLLM, {_DEFAULT_BLOCK} if it chooses itself"
            text = f"block_size in {settings.WHERE} must be a multiple of the engine's block ({of}), got {tokens}"
            yield "error" if known else "warning", text
    if is_engine_spec:
        yield from (("error", text) for text in _spec_faults(extra_config))


def _spec_faults(extra_config: Mapping[str, Any]) -> Iterator[str]:
    tiers = extra_config.get("secondary_tiers")
    if tiers is not None and (not isinstance(tiers, list) or not all(isinstance(entry, Mapping) for entry in tiers)):
        yield f"secondary_tiers in {settings.WHERE} must be a list of objects, got {tiers!r:.200}"
    threshold = extra_config.get("store_threshold")
    if extra_config.get("spec_name") == settings.ENGINE_SPECS[0] and type(threshold) is int and threshold > 1:
        yield f"store_threshold does not work with {settings.ENGINE_SPECS[0]}, got {threshold}"
    backpressure = extra_config.get("backpressure")
    if backpressure is not None and not isinstance(backpressure, Mapping):
        yield f"backpressure in {settings.WHERE} must be an object, got {backpressure!r:.200}"
    if extra_config.get("cache_policy_module_path") is None:
        try:
            choice_of("lru", "arc")("eviction_policy of vLLM itself", extra_config.get("eviction_policy", "lru"))
        except ValueError as error:
            yield str(error)


def copy_faults(extra_config: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield level and text of each option that does not work with our copies; `engine` is as for `node_faults`."""
    stages = engine.get("pipeline_parallel_size", 1)
    plane = extra_config.get(settings.DATA_PLANE) or ("vllm" if has_accelerator() else "kvcache")
    if stages != 1 and plane == "kvcache" and extra_config.get("tiers"):
        yield "error", f"'tiers' do not work with kvcache's worker in a pipeline of {stages!r} stages"
    if extra_config.get("store_threshold") in (0, 1):
        yield "warning", "store_threshold 0 and 1 store every block, as without it; 2 waits for the second offer"


def node_faults(engine: Mapping[str, Any], has_events: bool) -> Iterator[tuple[str, str]]:
    """Yield level and text of each option that a node's pool excludes; `engine` are vLLM's own options, or empty."""
    if has_events:
        yield "error", f"KV events do not work with {settings.NODE_POOL!r}; leave out kv_events_config"
    stages = engine.get("pipeline_parallel_size", 1)
    if stages != 1:
        yield "error", f"{settings.NODE_POOL!r} does not work with a pipeline of {stages!r} stages"
    algorithm = str(engine.get("prefix_caching_hash_algo", "sha256"))
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        text = f"{algorithm} has a random seed, and engines of a {settings.NODE_POOL!r} must hash alike"
        yield "warning", f"{text}: set PYTHONHASHSEED=0 for all of them, or prefix_caching_hash_algo to 'sha256'"


def adapter_fault(extra_config: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return why blocks of LoRA adapters may outlive their files, or ""; `engine` are vLLM's own options, or empty."""
    outliving = [name for name in ("tiers", "secondary_tiers", settings.NODE_POOL) if extra_config.get(name)]
    if not (engine.get("enable_lora") and outliving):
        return ""
    return (
        f"enable_lora with {outliving[0]!r}: blocks are known by an adapter's name and path, not by its files; give "
        "each new version of an adapter a new path or name"
    )


def has_accelerator() -> bool:
    """Return whether this machine shows a device of CUDA, ROCm or XPU; imports neither torch nor vLLM."""
    return any(any(Path("/dev").glob(pattern)) for pattern in _DEVICES)
