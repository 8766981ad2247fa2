"""KV-cache groups of a hybrid model: read from ``--groups`` or a config.json, and replayed as vLLM serves them.

Such a model resumes a prompt only where each windowed group has its last blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache.assembly.models import DTYPE_BYTES, config_path, read_config
from kvcache.block import ABSENT
from kvcache.control.pool import BlockPool
from kvcache.lab.simulate.run import Replay
from kvcache.options import MOST_KEY_GROUPS, check_int, parse_count
from kvcache.request import ReqContext

if TYPE_CHECKING:
    from kvcache.assembly.models import Model
    from kvcache.control.cpu import CPUOffloadingManager
    from kvcache.lab.simulate.run import ReplayClock
    from kvcache.lab.simulate.simulated_tier import SimulatedTieredManager
    from kvcache.lab.traces.requests import Request

_STEP_TOKENS = 8192
"""Tokens of a prompt that an engine computes in a step: vLLM's default."""
_ABSENT = bytes([ABSENT])
_FULL, _SLIDING, _STATE = "full", "swa", "mamba"
# How configurations name layers; None: a layer without a cache.
_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "*"), _FULL),
    "sliding_attention": _SLIDING,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "M"), _STATE),
    **dict.fromkeys(("mlp", "moe", "-", "E"), None),
}
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
# Fields of a recurrent layer: heads, head size, state size, groups of the convolution's input, and its kernel.
_STATE_FIELDS = (
    "mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel",
    "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv",
    "linear_num_value_heads linear_value_head_dim linear_key_head_dim linear_num_key_heads linear_conv_kernel_dim",
)


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV-cache groups of a model.

    `windows` are in blocks, or in tokens if the groups come from the file `config`; None: full attention. With
    `offers_all` the engine offers every windowed block, otherwise those of places where the request can resume. Each
    group has `num_layers` layers (None: unknown); the state of a recurrent layer has `state_bytes`.
    """

    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    offers_all: bool = False
    num_layers: int | None = None
    state_bytes: int = 0
    config: str | None = None

    def at(self, block_size: int) -> Groups:
        """Return the groups with windows in blocks of `block_size` tokens."""
        if self.config is None:
            return self
        # The next token attends to itself and to the window's other tokens.
        windows = [None if tokens is None else max(1, -(-(tokens - 1) // block_size)) for tokens in self.windows]
        return replace(self, windows=tuple(windows), config=None)

    def slot_bytes(self, model: Model, block_size: int) -> int:
        """Return the bytes of a slot, which holds a block or a state of any one group."""
        num_layers = self.num_layers or (model.num_layers - model.sliding_layers if model.sliding_layers else 0)
        num_layers = num_layers or -(-model.num_layers // (len(self.kinds) - self.kinds.count(_STATE)))
        return num_layers * max(block_size * model.values_per_layer * DTYPE_BYTES[model.dtype], self.state_bytes)

    def __str__(self) -> str:
        names = [f"{kind}:{n}" if kind == _SLIDING else kind for kind, n in zip(self.kinds, self.windows, strict=True)]
        return f"{','.join(names)}, windows in blocks, {'all' if self.offers_all else 'sparse'} windowed blocks offered"


def parse_groups(text: str) -> Groups:
    """Parse ``full,swa:1,mamba`` (windows in blocks) or the path of a config.json, and ``retention=0`` or ``null``.

    >>> parse_groups("full,swa:2,mamba").windows
    (None, 2, 1)
    """
    parts = text.split(",")
    retention = parts.pop().removeprefix("retention=") if parts[-1].startswith("retention=") else "0"
    if retention not in ("0", "null"):
        raise ValueError(f"--groups: retention must be 0 or null, got {retention!r}")
    path = config_path(parts[0]) if len(parts) == 1 else None
    if path is not None:
        return replace(read_config(path, _groups_of_config), config=str(path), offers_all=retention == "null")
    kinds, windows = zip(*map(_parse_group, parts), strict=True)
    _check_groups(kinds, text)
    return Groups(kinds, windows, retention == "null")


def _parse_group(text: str) -> tuple[str, int | None]:
    kind, colon, window = text.partition(":")
    if kind == _SLIDING and colon:
        return kind, parse_count("--groups: the window of swa", window)
    if kind in (_FULL, _STATE) and not colon:
        return kind, None if kind == _FULL else 1
    raise ValueError(f"--groups takes full, swa:BLOCKS and mamba, as in full,swa:1, or a config.json, got {text!r}")


def _check_groups(kinds: tuple[str, ...], source: str) -> None:
    if len(kinds) > MOST_KEY_GROUPS:
        raise ValueError(f"--groups: keys name at most {MOST_KEY_GROUPS} groups, got {len(kinds)}")
    if kinds.count(_FULL) != 1 or len(kinds) < 2:
        raise ValueError(f"--groups needs one full group and at least one other, got {','.join(kinds)} in {source!r}")


def _groups_of_config(config: Mapping[str, Any], name: str) -> Groups:
    """Group the layers of a configuration as vLLM does: equal numbers of layers, the last group padded."""
    field, layers = _layers_of(config)
    if unknown := [kind for kind in layers if kind not in _KINDS]:
        raise ValueError(f"{field!r} names a layer {unknown[0]!r}; a plan knows {', '.join(_KINDS)}")
    cached = [kind for kind in map(_KINDS.get, layers) if kind is not None]
    counts = {kind: cached.count(kind) for kind in sorted(set(cached))}
    num_layers, most = min(counts.values(), default=1), max(counts.values(), default=1)
    num_layers = most if most < 1.5 * num_layers else num_layers
    kinds = tuple(kind for kind, count in counts.items() for _ in range(-(-count // num_layers)))
    _check_groups(kinds, field)
    tokens = {_FULL: None, _STATE: 1, _SLIDING: _positive(config, "sliding_window") if _SLIDING in counts else 1}
    state_bytes = _state_bytes(config) if _STATE in counts else 0
    return Groups(kinds, tuple(tokens[kind] for kind in kinds), num_layers=num_layers, state_bytes=state_bytes)


def _layers_of(config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the field that describes the layers, and the name of each layer's kind."""
    for field in _LISTS:
        if isinstance(config.get(field), list | str):
            return field, list(map(str, config[field]))
    numbers = range(_positive(config, "num_hidden_layers"))
    indices = config.get("attn_layer_indices")
    if isinstance(indices, list):
        return "attn_layer_indices", ["attention" if i in indices else "mamba" for i in numbers]
    field = "_sliding_window_pattern" if "_sliding_window_pattern" in config else "sliding_window_pattern"
    if field not in config and not str(config.get("model_type")).startswith("gemma3"):
        raise ValueError(f"must name its layers' kinds in one of {', '.join(_LISTS)}, attn_layer_indices and {field}")
    # Files of Gemma 3 leave out the default.
    period = _positive(config, field) if field in config else 6
    return field, ["sliding_attention" if (i + 1) % period else "attention" for i in numbers]


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a recurrent layer's state: that of its heads, and the last inputs of its convolution."""
    names = next((names for names in map(str.split, _STATE_FIELDS) if names[0] in config), _STATE_FIELDS[0].split())
    heads, head_size, state_size, num_groups, kernel = (_positive(config, name) for name in names)
    head_bytes = DTYPE_BYTES["fp32" if config.get("mamba_ssm_cache_dtype") == "float32" else "bf16"]
    inputs = (heads * head_size + 2 * num_groups * state_size) * (kernel - 1)
    return heads * head_size * state_size * head_bytes + inputs * DTYPE_BYTES["bf16"]


def _positive(config: Mapping[str, Any], name: str) -> int:
    return check_int(repr(name), config.get(name))


class GroupReplay(Replay):
    """Replay requests of such a model; hits and blocks are those of full attention.

    With memory alone, one call stores a request. Above a tier, each step of the engine stores its blocks.
    """

    def __init__(
        self, manager: CPUOffloadingManager | SimulatedTieredManager, groups: Groups, arrivals: ReplayClock
    ) -> None:
        super().__init__(manager, arrivals=arrivals)
        self._cache, self._groups = manager, groups
        self._pool = manager if isinstance(manager, BlockPool) else manager.pool
        # A tier takes the blocks of one step before the next one comes, so a small host memory has room for all.
        self._step_blocks = None if self._pool is manager else max(1, _STEP_TOKENS // self._pool.block_size)
        self._uses_path = "group_windows" in self._pool.configuration()
        self.end_request = partial(manager.on_request_finished, use_positions=True)

    def step(self, request: Request, keys: list[bytes]) -> int:
        self.arrivals.now_s = max(self.arrivals.now_s, request.arrival_s)
        manager, pool, windows, clock = self._cache, self._pool, self._groups.windows, self.clock
        path = keys[: request.input_length // pool.block_size]
        names = [[key[:-4] + group.to_bytes(4, "big") for key in path] for group in range(len(windows))]
        anchors = names[windows.index(None)]
        ends = range(pool.block_size, pool.block_size * len(path) + 1, pool.block_size)
        context = ReqContext()
        context.set_offload_key_positions({key: end for group in names for key, end in zip(group, ends, strict=True)})
        # The engine always computes the last token of the prompt.
        limit = min(len(path), (request.input_length - 1) // pool.block_size)
        windowed = [(group, window) for group, window in zip(names, windows, strict=True) if window is not None]

        def needed(end: int) -> list[bytes]:
            """Return the keys that a request needs to resume at `end`."""
            return anchors[:end] + [key for group, window in windowed for key in group[max(end - window, 0) : end]]

        start = clock()
        full = (manager.states(anchors[:limit]) + _ABSENT).find(_ABSENT)
        num_hits = _resumable(full, windowed, manager.states)
        # Tiers read what the request needs, and nothing behind that.
        if manager.lookup(loads := needed(num_hits), context) < len(loads):
            # Host memory has no room for all of it.
            loads = needed(num_hits := _resumable(pool.match_prefix(anchors[:num_hits]), windowed, pool.states))
        if self._uses_path:
            pool.note_found(context, full * pool.block_size)
            manager.touch(anchors, context)
        else:
            pool.touch(anchors, context)
        spent = clock() - start
        # Above a tier, the policy decides about the loaded blocks first, as under vLLM.
        parts: list[list[bytes]] = [[]] if loads and self._uses_path and manager is not pool else []
        step_blocks = self._step_blocks or len(path) + 1
        for first in range(num_hits, max(len(path), num_hits + 1), step_blocks):
            last = min(first + step_blocks, len(path))
            parts.append(anchors[first:last])
            for group, window in windowed:
                places = {i for end in (full, limit) for i in range(max(end - window, first), min(end, last))}
                parts[-1] += group[first:last] if self._groups.offers_all else [group[i] for i in sorted(places)]
        self.serve(context, loads, parts, spent)
        self.count(request, num_hits, len(path))
        return num_hits


def _resumable(end: int, windowed: list[tuple[list[bytes], int]], find: Callable[[list[bytes]], bytes]) -> int:
    """Return the last place up to `end` where `find` knows the last blocks of every window."""
    states = [(find(group[:end]), window) for group, window in windowed]
    while (gap := max(there.rfind(_ABSENT, max(end - n, 0), end) for there, n in states)) >= 0:
        end = gap
    return end
