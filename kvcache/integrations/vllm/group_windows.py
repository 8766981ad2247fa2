"""The windows of a model's groups of KV caches, which `gittins` needs to store and evict whole stretches.

vLLM 0.33 names them in the configuration of a spec. Before, only the scheduler of its connector has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any


def find_windows(groups: Sequence[Any], caller: FrameType | None = None) -> list[int | None]:
    """Return each group's window in offloaded blocks, or None for a group without a window.

    `groups` are those of vLLM's `OffloadingConfig`. `caller` is the frame in which the connector's scheduler asks for
    its manager. ValueError says why the windows are unknown, or which model has no rule.
    """
    connector = caller.f_locals.get("self") if caller is not None else None
    # These are the windows with which vLLM searches for a hit.
    groups = getattr(getattr(connector, "config", None), "kv_group_configs", groups)
    if not all(hasattr(group, "sliding_window_size_in_chunks") for group in groups):
        raise ValueError("this release of vLLM does not name their windows")
    indices = [getattr(group, "group_idx", getattr(group, "group_id", i)) for i, group in enumerate(groups)]
    if indices != list(range(len(groups))):
        raise ValueError(f"only groups {indices} are offloaded")
    if len(sizes := sorted({group.tokens_per_block for group in groups})) > 1:
        raise ValueError(f"their blocks have {sizes} tokens")
    if drafters := [i for i, group in enumerate(groups) if getattr(group, "is_eagle_group", False)]:
        raise ValueError(f"groups {drafters} hold layers of a draft model")
    return [group.sliding_window_size_in_chunks for group in groups]
