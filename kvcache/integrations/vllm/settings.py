"""What users write in ``kv_connector_extra_config``: the options of every pool, and what the engine makes of them.

Needs no vLLM, so that a configuration can be checked before one starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache.assembly.assemble import OffloadSettings
from kvcache.options import choice_of, name_unknown

WHERE = "kv_connector_extra_config"
SPEC_NAME = "KVCacheOffloadingSpec"
# Of this adapter; the library's is lru.
DEFAULT_POLICY = "gittins"
SELF_DESCRIBING = "self_describing_kv_events"
UNDESCRIBED = f"KV events are on without {SELF_DESCRIBING!r}: true in {WHERE}; routers ignore events without tokens"

# Read by vLLM itself out of the same mapping.
ENGINE_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        SELF_DESCRIBING,
        "spec_module_path",
        "spec_name",
        "sync_load_budget_bytes",
    }
)
_DECIDED_BY_ENGINE = frozenset({"num_cpu_blocks", "enable_events"})
OUR_KEYS = OffloadSettings.keys() - _DECIDED_BY_ENGINE
DATA_PLANE = "data_plane"
KNOWN_KEYS = ENGINE_KEYS | OUR_KEYS | {DATA_PLANE}
parse_data_plane = choice_of("vllm", "kvcache")
_RENAMED_KEYS = {"eviction_policy": "cache_policy", "cache_policy_module_path": "cache_policy"}


def read_settings(extra_config: Mapping[str, Any], num_groups: int = 1) -> OffloadSettings:
    """Read and check the mapping; no side effects.

    Where no policy is named it is `gittins`, for a model with one group of KV caches: it stores nothing behind a
    block that is absent, and groups with a sliding window leave blocks out. For `num_groups` > 1 it is `lru`.

    Raises
    ------
    ValueError
        ``cpu_bytes_to_use`` is missing, an option is invalid (also one of a tier or an exporter), or vLLM's name of an
        option that kvcache calls otherwise is given; the message names it.
    """
    for key, ours in _RENAMED_KEYS.items():
        if key in extra_config:
            raise ValueError(f"kvcache reads {ours!r}, not {key!r}={extra_config[key]!r}")
    data_plane = extra_config.get(DATA_PLANE)
    if data_plane is not None:
        parse_data_plane(f"{DATA_PLANE} in {WHERE}", data_plane)
    if extra_config.get("canonical_layout") and data_plane == "kvcache":
        raise ValueError("the data plane 'kvcache' keeps each rank's own bytes; it does not support 'canonical_layout'")
    spec_name = extra_config.get("spec_name", SPEC_NAME)
    if spec_name != SPEC_NAME and extra_config.get("spec_module_path") == __package__:
        raise ValueError(f"spec_name of {__package__} must be {SPEC_NAME!r}, got {spec_name!r}")
    given = {key: value for key, value in extra_config.items() if key not in _DECIDED_BY_ENGINE | {DATA_PLANE}}
    settings = OffloadSettings.read({"cache_policy": DEFAULT_POLICY if num_groups == 1 else "lru", **given}, WHERE)
    if any(one.exporter.needs_events for one in settings.exporters):
        raise ValueError("the exporter 'kv_events' does not work under vLLM; use vLLM's --kv-events-config")
    if settings.cpu_bytes_to_use is None:
        raise ValueError(f"{WHERE} must have 'cpu_bytes_to_use', the host memory of all ranks: bytes, or '64GiB'")
    if settings.pool_path is not None:
        raise ValueError(f"'pool_path' does not work under vLLM; use 'pool_folder', got {settings.pool_path!r}")
    if settings.tiers and not Path(settings.pool_folder).is_dir():
        raise ValueError(f"pool_folder must be a folder in shared memory, got {settings.pool_folder!r}")
    return settings


def unknown_keys(extra_config: Mapping[str, Any]) -> str:
    """Return the keys that neither kvcache nor vLLM reads, each with the known one it resembles; "" for none."""
    return name_unknown(extra_config, KNOWN_KEYS)


def blocks_per_rank(settings: OffloadSettings, world_size: int, bytes_per_block: int, num_stages: int = 1) -> int:
    """Return how many blocks each rank's share of the memory holds.

    Parameters
    ----------
    settings : OffloadSettings
        With `cpu_bytes_to_use`.
    world_size : int
        Ranks that share it evenly.
    bytes_per_block : int
        Bytes of one offloaded block on one rank.
    num_stages : int
        Stages of a pipeline that the ranks make up.

    Raises
    ------
    ValueError
        The engine has no KV cache to offload, a share does not hold one block, or tiers meet a pipeline.
    """
    if bytes_per_block < 1:
        raise ValueError(f"the engine names no KV cache to offload (bytes per block: {bytes_per_block})")
    if settings.tiers and num_stages > 1:
        raise ValueError(
            f"'tiers' under vLLM are for tensor parallelism, this engine is a pipeline of {num_stages} stages, "
            "whose parts of a block differ in size; leave 'tiers' out"
        )
    return settings.num_blocks(bytes_per_block, world_size, WHERE)
