"""The windows of a model's groups of KV caches, which `gittins` needs to store and evict whole stretches.

vLLM 0.33 names them in the configuration of a spec. Before, only the scheduler of its connector has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any


def local_of_caller(name: str, attribute: str) -> Any:
    """Return the nearest caller's local variable `name` that has an attribute, or None."""
    frame = inspect.currentframe()
    while frame is not None and not hasattr(frame.f_locals.get(name), attribute):
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def described_groups(config: Any) -> Sequence[Any]:
    """Return the groups of vLLM's `OffloadingConfig` with their windows and drafters, also in a worker.

    The connector that makes a spec has them: a local variable of a caller. ValueError: no caller is a connector, or its
    groups lack what this release of kvcache reads.
    """
    try:
        return _groups_of_caller(config)
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"groups {config.groups!r:.200} of vLLM's configuration are unknown: {error}") from None


def _groups_of_caller(config: Any) -> Sequence[Any]:
    caches = local_of_caller("kv_cache_config", "kv_cache_groups")
    if caches is None:
        raise ValueError("vLLM does not show them to a worker")
    caches = [caches.kv_cache_groups[group.group_id] for group in config.groups]

    def window_of(group: Any, cache: Any) -> Any:
        if hasattr(group, "sliding_window_size_in_chunks"):
            return group.sliding_window_size_in_chunks
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        tokens = group.tokens_per_block * config.cache.blocks_per_chunk
        return scheduler.get_sliding_window_size_in_chunks(cache.kv_cache_spec, tokens)

    return [
        SimpleNamespace(
            group_id=group.group_id,
            tokens_per_block=group.tokens_per_block,
            is_eagle_group=cache.is_eagle_group,
            sliding_window_size_in_chunks=window_of(group, cache),
        )
        for group, cache in zip(config.groups, caches, strict=True)
    ]


def find_windows(groups: Sequence[Any], caller: FrameType | None = None) -> list[int | None]:
    """Return each group's window in offloaded blocks, or None for a group without a window.

    `groups` are those of vLLM's `OffloadingConfig`. `caller` is the frame in which the connector's scheduler asks for
    its manager. ValueError says why the windows are unknown, or which model has no rule.
    """
    connector = caller.f_locals.get("self") if caller is not None else None
    # These are the windows with which vLLM searches for a hit.
    groups = getattr(getattr(connector, "config", None), "kv_group_configs", groups)
    names = ("sliding_window_size_in_chunks", "tokens_per_block")
    if not all(hasattr(group, name) for group in groups for name in names):
        raise ValueError("this release of vLLM does not name their windows")
    indices = [getattr(group, "group_idx", getattr(group, "group_id", i)) for i, group in enumerate(groups)]
    if indices != list(range(len(groups))):
        raise ValueError(f"only groups {indices} are offloaded")
    if len(sizes := sorted({group.tokens_per_block for group in groups})) > 1:
        raise ValueError(f"their blocks have {sizes} tokens")
    if drafters := [i for i, group in enumerate(groups) if getattr(group, "is_eagle_group", False)]:
        raise ValueError(f"groups {drafters} hold layers of a draft model")
    return [group.sliding_window_size_in_chunks for group in groups]
