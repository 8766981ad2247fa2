"""What users write in ``kv_connector_extra_config``, at each of the two places where kvcache plugs in.

Needs no vLLM, so that a configuration can be checked before one starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvcache.assembly.assemble import KindOptions, OffloadSettings, TierSettings, parse_kind
from kvcache.options import (
    Options,
    choice_of,
    count_from,
    format_size,
    name_unknown,
    option,
    parse_count,
    parse_flag,
    run_all,
)
from kvcache.registry import POLICIES, REMOVED

WHERE = "kv_connector_extra_config"
SPEC_NAME = "KVCacheOffloadingSpec"
# Of this adapter; the library's is lru.
DEFAULT_POLICY = "gittins"
SELF_DESCRIBING = "self_describing_kv_events"
UNDESCRIBED = f"KV events are on without {SELF_DESCRIBING!r}: true in {WHERE}; routers ignore events without tokens"


def _parse_whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, as vLLM reads it, got {value!r}")
    return parse_count(name, value)


@dataclass(frozen=True)
class EngineKeys(Options):
    """Options that vLLM reads with each of its specs, out of the same mapping as ours."""

    where: ClassVar[str] = WHERE

    block_size: int | None = option(_parse_whole, None, when="offloaded blocks should be larger: tokens of one")
    blocks_per_chunk: int | None = option(_parse_whole, None, when="offloaded blocks should be larger")
    offload_prompt_only: bool = option(parse_flag, True, when="generated tokens are used again, too")
    canonical_layout: bool = option(parse_flag, False, when="engines with other numbers of ranks should share blocks")
    self_describing_kv_events: bool = option(parse_flag, False, when="routers need the tokens of blocks")


@dataclass(frozen=True)
class EngineSpecKeys(EngineKeys):
    """Options that only vLLM's own specs read."""

    store_threshold: int = option(count_from(0), 0, when="most prompts are used once")
    max_tracker_size: int = option(parse_count, 64_000, when="`store_threshold` must remember more keys")


_ENGINE_KEYS = EngineKeys.declared().keys() | {"spec_module_path", "spec_name", "sync_load_budget_bytes"}
_DECIDED_BY_ENGINE = frozenset({"num_cpu_blocks", "enable_events"})
OUR_KEYS = OffloadSettings.declared().keys() - _DECIDED_BY_ENGINE
DATA_PLANE = "data_plane"
NODE_POOL = "node_pool"
GROUP_WINDOWS = "group_windows"
# Removed options are refused when they are parsed.
KNOWN_KEYS = _ENGINE_KEYS | OUR_KEYS | {DATA_PLANE, NODE_POOL} | REMOVED.keys()
_parse_data_plane = choice_of("vllm", "kvcache")
_ENGINE_POLICY_KEYS = frozenset({"eviction_policy", "cache_policy_module_path"})

ENGINE_SPECS = ("TieringOffloadingSpec", "CPUOffloadingSpec")
"""vLLM's own specs; the first may have our tiers."""
_CONNECTOR_VALUES = {"kv_connector": ("OffloadingConnector",), "kv_role": ("kv_producer", "kv_consumer", "kv_both")}
_ENGINE_SPEC_KEYS = _ENGINE_KEYS | EngineSpecKeys.declared().keys() | _ENGINE_POLICY_KEYS
_ENGINE_SPEC_KEYS |= {"backpressure", "cpu_bytes_to_use", "secondary_tiers", "tier_poll_interval_s"}
# vLLM's factory reads these keys of a secondary tier itself.
ENGINE_TIER_KEYS = frozenset({"type", "module_path", "backpressure"})


@dataclass(frozen=True)
class KVCacheTierOptions(KindOptions):
    """The options of a `KVCacheTier`; its entry of ``secondary_tiers`` also holds those of the tier it names."""

    where: ClassVar[str] = "a KVCacheTier"

    locality: str | None = option(choice_of("LOCAL", "REMOTE"), None, when="requests or routers select tiers by it")
    offload_policy: str = option(
        choice_of("chunk_level", "request_level"), "chunk_level", when="host blocks are to be written again"
    )
    enable_kv_events: bool = option(parse_flag, True, when="the tier's events must be left out of vLLM's events")
    forget_on_reset: bool = option(
        parse_flag, False, when="weights change while the engine runs: vLLM resets host memory alone"
    )
    max_store_blocks: int | None = option(
        parse_count, None, when="writes must hold less than half of the host blocks", rare=True
    )


def read_tier(config: Mapping[str, Any]) -> tuple[KVCacheTierOptions, TierSettings]:
    """Parse an entry of ``secondary_tiers``; raise ValueError naming each option that is invalid or unknown."""
    return parse_kind(config, ENGINE_TIER_KEYS, KVCacheTierOptions)


def uses_kvcache(extra_config: Mapping[str, Any]) -> bool:
    """Return whether a configuration of vLLM names this package: as its spec or as a secondary tier."""
    return extra_config.get("spec_module_path") == __package__ or bool(_tiers(extra_config))


def connector_faults(transfer: Mapping[str, Any]) -> list[str]:
    """Return why vLLM would not make its OffloadingConnector of this ``--kv-transfer-config``; empty if it would.

    A mapping that holds nothing but ``kv_connector_extra_config`` is an excerpt.
    """
    if len(transfer) < 2:
        return []
    misplaced = [f"{name} must be inside {WHERE}" for name in sorted(KNOWN_KEYS.intersection(transfer))]
    return misplaced + [
        f"{name} must be {' or '.join(map(repr, values))}, got {transfer.get(name)!r}"
        for name, values in _CONNECTOR_VALUES.items()
        if transfer.get(name) not in values
    ]


def spec_fault(extra_config: Mapping[str, Any]) -> str:
    """Return why vLLM would make another spec than ours, or its own without a part of ours, or ""."""
    name, module = extra_config.get("spec_name"), extra_config.get("spec_module_path")
    if is_engine_spec(extra_config):
        if uses_kvcache(extra_config):
            return ""
        return f"no tier has the module_path {__package__!r}"
    if name is None or module != __package__:
        return (
            f"spec_name and spec_module_path must be {SPEC_NAME!r} and {__package__!r}, or spec_name "
            f"{ENGINE_SPECS[0]!r} with a tier of kvcache; got {name!r} and {module!r}"
        )
    return ""


def is_engine_spec(extra_config: Mapping[str, Any]) -> bool:
    """Return whether the spec of a configuration is vLLM's own."""
    is_by_part = extra_config.get("spec_module_path") is None and uses_kvcache(extra_config)
    return is_by_part or extra_config.get("spec_name") in ENGINE_SPECS


def _tiers(extra_config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of ``secondary_tiers`` that this package implements."""
    tiers = extra_config.get("secondary_tiers")
    entries = tiers if isinstance(tiers, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping) and entry.get("module_path") == __package__]


def weights_version(extra_config: Mapping[str, Any], number: int) -> str | int | None:
    """Return the version of the weights that the tier of this number is opened with."""
    entry = _tiers(extra_config)[number] if is_engine_spec(extra_config) else extra_config
    return entry.get("weights_version")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where kvcache plugs into vLLM, parsed: `OurManager` or `OurTier`.

    `settings` describe host memory and the tiers below it. `policy` selects the blocks that leave host memory.
    """

    known_keys: ClassVar[Set[str]] = _ENGINE_SPEC_KEYS
    settings: OffloadSettings
    policy: str | type

    @property
    def has_engine_worker(self) -> bool | None:
        """Whether vLLM's worker copies the blocks; None: on CUDA, ROCm and XPU."""
        return True

    def shares_one_copy(self, is_latent: bool | None) -> bool:
        """Return whether host memory holds one copy of a block for all ranks: vLLM's worker keeps one of latent values.

        `is_latent`: whether the model has multi-head latent attention only; None: unknown.
        """
        return is_latent is True and self.has_engine_worker is not False

    def describe_copies(self, rank_block_bytes: int, num_ranks: int, is_latent: bool | None = None) -> str:
        """Describe the worker that copies blocks; if `rank_block_bytes` is not 0, a rank's chunks and bytes, too."""
        in_engine = (
            "vLLM's worker, "
            + {
                None: "one copy for all ranks of a pure MLA model and otherwise each rank's part",
                True: "one copy for all ranks",
                False: "each rank's part",
            }[is_latent]
        )
        in_kvcache = "kvcache's worker, each rank's part"
        copies = {
            None: f"on CUDA, ROCm and XPU {in_engine}; on the CPU {in_kvcache}",
            True: in_engine,
            False: in_kvcache,
        }[self.has_engine_worker]
        if not rank_block_bytes:
            return copies
        # Host memory is aligned to pages, a chunk at a time.
        is_shared = self.shares_one_copy(is_latent)
        chunk_bytes = -(-rank_block_bytes * (1 if is_shared else num_ranks) // 4096) * 4096
        num_chunks = (self.settings.cpu_bytes_to_use or 0) // chunk_bytes
        where = "in all" if is_shared else "on each rank"
        num_bytes = format_size(num_chunks * rank_block_bytes)
        return f"{copies}; {num_chunks:,} chunks of {rank_block_bytes:,} bytes and {num_bytes} {where}"


@dataclass(frozen=True, slots=True)
class OurManager(Placement):
    """Our manager, by `KVCacheOffloadingSpec`; `data_plane` is None if the platform selects the worker.

    `node_pool` is the name of the pool that engines of one machine share, True for one named by the model, or None.
    """

    known_keys: ClassVar[Set[str]] = KNOWN_KEYS
    data_plane: str | None = None
    node_pool: str | bool | None = None

    @property
    def has_engine_worker(self) -> bool | None:
        return None if self.data_plane is None else self.data_plane == "vllm"


@dataclass(frozen=True, slots=True)
class OurTier(Placement):
    """Tiers of ours below vLLM's own manager, by `KVCacheTier`; the policy is vLLM's."""


def read_config(extra_config: Mapping[str, Any], num_groups: int = 1) -> Placement:
    """Parse ``kv_connector_extra_config``; no side effects. ValueError names each option that is missing or invalid.

    `num_groups` is the model's number of groups of KV caches, which decides the default policy of our manager.
    """
    if not is_engine_spec(extra_config):
        return _read_manager(extra_config, num_groups)
    entries = _tiers(extra_config)
    tiers, num_bytes = run_all(
        (
            lambda: run_all(partial(_read_engine_tier, entry, extra_config.get("spec_name")) for entry in entries),
            partial(_read_engine_bytes, extra_config.get("cpu_bytes_to_use")),
        )
    )
    settings = OffloadSettings(cpu_bytes_to_use=num_bytes, tiers=tuple(tiers))
    return OurTier(settings, str(extra_config.get("eviction_policy", "lru")))


def _read_engine_tier(entry: Mapping[str, Any], spec_name: object) -> TierSettings:
    choice_of("KVCacheTier")(f"type of a secondary tier of {__package__}", entry.get("type"))
    if spec_name != ENGINE_SPECS[0]:
        raise ValueError(f"secondary_tiers need spec_name {ENGINE_SPECS[0]!r}, got {spec_name!r}")
    return read_tier(entry)[1]


def _read_engine_bytes(given: object) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"cpu_bytes_to_use in {WHERE} must be a number of bytes, as vLLM reads it, got {given!r}")
    return given


def _read_manager(extra_config: Mapping[str, Any], num_groups: int) -> OurManager:
    """Parse the configuration of our manager.

    Without a policy it is `gittins` for a model with one group of KV caches, or if `group_windows` are given. For
    `num_groups` > 1 it is `lru`, until the spec knows their windows: groups with a window leave blocks out, and without
    windows `gittins` stores nothing behind a block that is absent.
    """
    options = {key: value for key, value in extra_config.items() if key not in _DECIDED_BY_ENGINE}
    windows = options.get(GROUP_WINDOWS)
    policy = DEFAULT_POLICY if num_groups == 1 or windows is not None else "lru"
    settings, data_plane, node_pool = run_all(
        (
            partial(OffloadSettings.parse_part, {"cache_policy": policy, **options}, WHERE),
            partial(_read_data_plane, extra_config),
            partial(_read_node_pool, extra_config),
        )
    )
    _check_under_engine(settings)
    if node_pool:
        _check_node(settings, extra_config)
    if num_groups > 1 and settings.group_windows is not None and len(settings.group_windows) != num_groups:
        raise ValueError(f"{GROUP_WINDOWS} must name the model's {num_groups} groups of KV caches, got {windows!r}")
    return OurManager(settings, settings.cache_policy, data_plane, node_pool)


def _read_node_pool(extra_config: Mapping[str, Any]) -> str | bool | None:
    name = extra_config.get(NODE_POOL)
    if name is None or name is False:
        return None
    if extra_config.get("canonical_layout"):
        raise ValueError(f"{NODE_POOL!r} does not support 'canonical_layout'; leave it out")
    if name is not True:
        from kvcache.node.protocol import check_name

        check_name(name.replace("{model}", "model") if isinstance(name, str) else name)
    return True if name is True else str(name)


def _check_node(settings: OffloadSettings, extra_config: Mapping[str, Any]) -> None:
    """Raise ValueError if options of one engine's own pool are set for a pool of all engines."""
    if "pool_folder" in extra_config:
        raise ValueError(f"the pool of a {NODE_POOL!r} lies in /dev/shm; leave 'pool_folder' out")
    for tier in settings.tiers:
        path = getattr(tier.options, "path", "")
        if "rank}" in path:
            raise ValueError(
                f"below a {NODE_POOL!r} one tier serves all engines; leave '{{dp_rank}}' and '{{rank}}' out of its "
                f"path, got {path!r}"
            )


def node_options(extra_config: Mapping[str, Any], settings: OffloadSettings, model: str = "{model}") -> dict[str, Any]:
    """Return the options of a node's owner, as JSON types: all engines of the node must have the same options.

    ``{model}`` in the paths of tiers and of a recording is replaced by `model`. Windows are not among the options: a
    service does not know its engines' model, so the windows identify the engine.
    """
    names = OUR_KEYS - {"cpu_bytes_to_use", GROUP_WINDOWS, "pool_folder", "num_copy_threads", "weights_version"}
    options = {name: deepcopy(extra_config[name]) for name in sorted(names) if extra_config.get(name) is not None}
    for part, key in [(options, "record"), *((tier, "path") for tier in options.get("tiers", ()))]:
        if isinstance(part.get(key), str):
            part[key] = part[key].replace("{model}", model)
    return {**options, "cache_policy": POLICIES.path_of(settings.cache_policy)}


def _read_data_plane(extra_config: Mapping[str, Any]) -> str | None:
    """Parse the keys that only the adapter reads."""
    for key in _ENGINE_POLICY_KEYS & extra_config.keys():
        raise ValueError(f"kvcache reads 'cache_policy', not {key!r}={extra_config[key]!r}")
    data_plane = extra_config.get(DATA_PLANE)
    if data_plane is not None:
        _parse_data_plane(f"{DATA_PLANE} in {WHERE}", data_plane)
    if extra_config.get("canonical_layout") and data_plane == "kvcache":
        raise ValueError("the data plane 'kvcache' keeps each rank's own bytes; it does not support 'canonical_layout'")
    spec_name = extra_config.get("spec_name", SPEC_NAME)
    if spec_name != SPEC_NAME and extra_config.get("spec_module_path") == __package__:
        raise ValueError(f"spec_name of {__package__} must be {SPEC_NAME!r}, got {spec_name!r}")
    return data_plane


def _check_under_engine(settings: OffloadSettings) -> None:
    """Raise ValueError if the options of our manager do not work under vLLM."""
    if settings.cpu_bytes_to_use is None:
        raise ValueError(f"{WHERE} must have 'cpu_bytes_to_use', the host memory of all ranks: bytes, or '64GiB'")
    if settings.pool_path is not None:
        raise ValueError(f"'pool_path' does not work under vLLM; use 'pool_folder', got {settings.pool_path!r}")
    if settings.tiers and not Path(settings.pool_folder).is_dir():
        raise ValueError(f"pool_folder must be a folder in shared memory, got {settings.pool_folder!r}")


def larger_blocks(extra_config: Mapping[str, Any], engine_block: object) -> str:
    """Return a warning if offloaded blocks differ in size from the engine's `engine_block` tokens, else ""."""
    offloaded, chunk = extra_config.get("block_size") or engine_block, extra_config.get("blocks_per_chunk", 1)
    if offloaded == engine_block and chunk == 1:
        return ""
    return (
        f"offloaded blocks (block_size={offloaded!r}, blocks_per_chunk={chunk!r}) differ from the engine's "
        f"({engine_block!r} tokens): vLLM announces each block of the engine and loads whole offloaded blocks only, so "
        "routers expect more hits than there are"
    )


def unknown_keys(extra_config: Mapping[str, Any]) -> str:
    """Return the keys that neither kvcache nor vLLM reads, each with the known one it resembles; "" for none."""
    placement = OurTier if is_engine_spec(extra_config) else OurManager
    return name_unknown(extra_config, placement.known_keys)


def blocks_per_rank(settings: OffloadSettings, world_size: int, rank_block_bytes: int, num_stages: int = 1) -> int:
    """Return how many blocks of `rank_block_bytes` each of `world_size` ranks' shares of the memory holds.

    ValueError: the engine has no KV cache to offload, a share does not hold one block, or tiers meet a pipeline of
    `num_stages` > 1.
    """
    if rank_block_bytes < 1:
        raise ValueError(f"the engine names no KV cache to offload (bytes per block: {rank_block_bytes})")
    if settings.tiers and num_stages > 1:
        raise ValueError(
            f"'tiers' under vLLM are for tensor parallelism, this engine is a pipeline of {num_stages} stages, "
            "whose parts of a block differ in size; leave 'tiers' out"
        )
    return settings.num_blocks(rank_block_bytes, world_size, WHERE)
