"""What users write in ``kv_connector_extra_config``, checked and put into our words; needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.registry import POLICIES
from kvcache.spec.assembly import read_tiers
from kvcache.spec.base import warn_of_unknown

# Read by vLLM itself out of the same mapping.
ENGINE_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "sync_load_budget_bytes",
    }
)
_MANAGER_KEYS = ("max_tracker_size", "retention_share", "store_threshold")
_TIER_KEYS = ("lookup_deadline_s", "pool_folder")
_OUR_KEYS = frozenset({"cache_policy", "cpu_bytes_to_use", "num_copy_threads", "tiers", *_MANAGER_KEYS, *_TIER_KEYS})
_RENAMED_KEYS = {"eviction_policy": "cache_policy", "cache_policy_module_path": "cache_policy"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Our part of ``kv_connector_extra_config``.

    Parameters
    ----------
    cpu_bytes_to_use : int
        Host memory for all ranks of one engine together.
    cache_policy : str
        A policy's name or ``"package.module:Class"``.
    num_copy_threads : int or None
        At most so many copy threads per direction, where the engine runs on the CPU.
    manager_options : dict
        What else the manager is built with, as given: ``store_threshold``, ``max_tracker_size``, ``retention_share``.
    tiers : list of dict or None
        What lies below host memory, as `kvcache.spec.assembly.read_tiers` takes it.
    pool_folder : str
        With tiers: a folder in shared memory for the host blocks.
    lookup_deadline_s : float
        With tiers: how long a request waits for them at most.
    """

    cpu_bytes_to_use: int
    cache_policy: str
    num_copy_threads: int | None
    manager_options: dict[str, Any]
    tiers: list[dict[str, Any]] | None = None
    pool_folder: str = "/dev/shm"
    lookup_deadline_s: float = 5.0

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Settings:
        """Check and read the mapping.

        Raises
        ------
        ValueError
            ``cpu_bytes_to_use`` is missing or no positive whole number, the policy is unknown, the tiers make no
            sense, or a key means something that kvcache says otherwise or cannot do.
        """
        for key, ours in _RENAMED_KEYS.items():
            if key in extra_config:
                raise ValueError(f"kvcache reads {ours!r}, not {key!r}={extra_config[key]!r}")
        if extra_config.get("canonical_layout"):
            raise ValueError("kvcache keeps each rank's own bytes; 'canonical_layout' is not supported")
        known = ENGINE_KEYS | _OUR_KEYS | {"canonical_layout"}
        warn_of_unknown("kv_connector_extra_config", extra_config, known)
        if "cpu_bytes_to_use" not in extra_config:
            raise ValueError("kv_connector_extra_config must say 'cpu_bytes_to_use' (bytes, for all ranks together)")
        policy = extra_config.get("cache_policy", "lru")
        POLICIES.resolve(policy)
        return cls(
            cpu_bytes_to_use=_whole("cpu_bytes_to_use", extra_config["cpu_bytes_to_use"]),
            cache_policy=policy,
            num_copy_threads=_whole("num_copy_threads", extra_config["num_copy_threads"])
            if "num_copy_threads" in extra_config
            else None,
            manager_options={key: extra_config[key] for key in _MANAGER_KEYS if key in extra_config},
            **_tier_settings(extra_config),
        )

    def num_blocks(self, world_size: int, bytes_per_block: int, num_stages: int = 1) -> int:
        """Return how many blocks each rank's share of the memory holds.

        Parameters
        ----------
        world_size : int
            Ranks that share `cpu_bytes_to_use` evenly.
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
        if self.tiers is not None and num_stages > 1:
            raise ValueError(
                f"'tiers' under vLLM are for tensor parallelism, this engine is a pipeline of {num_stages} stages, "
                "whose parts of a block differ in size; leave 'tiers' out"
            )
        num_blocks = self.cpu_bytes_to_use // world_size // bytes_per_block
        if num_blocks < 1:
            raise ValueError(
                f"cpu_bytes_to_use={self.cpu_bytes_to_use} is too small: each of {world_size} ranks gets "
                f"{self.cpu_bytes_to_use // world_size} bytes, and one block takes {bytes_per_block}"
            )
        return num_blocks


def _tier_settings(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: extra_config[key] for key in _TIER_KEYS if key in extra_config}
    if "tiers" not in extra_config:
        if found:
            raise ValueError(f"{', '.join(found)} in kv_connector_extra_config mean nothing without 'tiers'")
        return {}
    read_tiers(extra_config["tiers"])
    folder = found.get("pool_folder", "/dev/shm")
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise ValueError(f"pool_folder must be a folder in shared memory, got {folder!r}")
    deadline_s = found.get("lookup_deadline_s", 5.0)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not deadline_s > 0:
        raise ValueError(f"lookup_deadline_s must be a number > 0, got {deadline_s!r}")
    return {"tiers": [dict(one) for one in extra_config["tiers"]], **found}


def _whole(name: str, value: Any) -> int:
    """Return a positive whole number; JSON may write one as ``1e9`` or ``"1000000000"``."""
    try:
        number = int(value)
        whole = not isinstance(value, bool) and number > 0 and (isinstance(value, str) or number == value)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return number
