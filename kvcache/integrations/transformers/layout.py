"""Layout of one block in host memory: the keys and values of every layer, side by side.

The layout is measured on the model (forwards over a few tokens), because no config field describes the cache of every
architecture.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMixin

# It stores nothing: the layer reads keys and values of another one, or has no attention. Absent before 5.23.
_DummyLayer = getattr(cache_utils, "DummyLayer", None)
# Renamed in 5.24, where the old name warns.
_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if "cache" in _PARAMETERS else "past_key_values"
_SUPPORTED_LAYERS = (_DummyLayer, DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer's keys (`part` 0) or values (1) within a block: bytes `start` to `stop`.

    The layer's tensor has shape (batch, `num_heads`, tokens, `head_dim`).
    """

    layer: int
    part: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A cache built from blocks, and the end of them, which the model computes again.

    `past` holds `start` columns before the model runs, and columns `start` to `length` are computed again; `stored`
    has the stored keys or values of these, per piece. Row `i` begins with `num_pads[i]` columns of padding.
    """

    past: DynamicCache
    start: int
    length: int
    num_pads: list[int]
    stored: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not computed again, over all rows."""
        return sum(max(0, self.start - pads) for pads in self.num_pads)


def new_past(config: Any) -> DynamicCache:
    """Return an empty cache whose sliding-window layers also keep tokens outside their window."""
    past = DynamicCache(config=config)
    past.activate_past_recording()
    return past


@torch.no_grad()
def run(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: DynamicCache) -> None:
    """Compute the columns that `past` lacks, as `generate` does."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # peft's wrapper does not name positions
    options = {} if attention_mask.all() else {"attention_mask": attention_mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
    missing = input_ids.shape[1] - past.get_seq_length()
    model(
        **model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=missing, use_cache=True, **{CACHE_ARGUMENT: past}, **options
        )
    )


class KVLayout:
    """Offsets of keys and values in a block of `block_size` tokens, and the copies in and out.

    The constructor runs two short forwards of the model, and raises ValueError if a prefix of its cache cannot be cut
    out and restored. `padding_matters`: a prompt's keys and values depend on the padding before it.
    """

    # Tokens of the prompt that `check_repeatable` computes in one part and in two.
    _NUM_REPEATED = 8

    def __init__(self, model: Any, block_size: int) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.block_size = block_size
        self.padding_matters = False
        # Rounding may route a token to another expert, and so change it by any amount.
        self._is_routed = any("expert" in path or "router" in path for path, _ in model.named_modules())
        past = self._probe(model)
        self.num_layers = len(past.layers)
        pieces: list[Piece] = []
        start = 0
        for i, layer in enumerate(past.layers):
            for part, states in enumerate(_kept(layer)):
                _, num_heads, _, head_dim = states.shape
                stop = start + num_heads * block_size * head_dim * states.itemsize
                pieces.append(Piece(i, part, num_heads, head_dim, states.dtype, states.device, start, stop))
                start = -(-stop // 8) * 8
        self.pieces = pieces
        self.block_bytes = start
        devices = {piece.device for piece in pieces}
        # Blocks of a model on several devices are assembled in host memory.
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")

    def _probe(self, model: Any) -> DynamicCache:
        """Run two prompts that differ in their last token, and one with padding; return the cache of the two."""
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder: its keys and values depend on more than a prefix")
        past = new_past(model.config)
        for i, layer in enumerate(past.layers):
            if type(layer) not in _SUPPORTED_LAYERS:
                raise ValueError(
                    f"layer {i} of {name} keeps a {type(layer).__name__}; only full-attention and sliding-window "
                    "layers can be cut at a block"
                )
        stretching = {"dynamic", "longrope"}.intersection(_rope_types(getattr(self.config, "rope_parameters", None)))
        if stretching:
            raise ValueError(
                f"{name} has rotary embeddings of type {stretching.pop()!r}, which change a prefix's keys with the "
                "length of the whole prompt"
            )
        device = model.get_input_embeddings().weight.device
        # A causal model computes equal keys for the first token of both prompts.
        run(model, torch.tensor([[0, 1], [0, 0]], device=device), torch.ones(2, 2, device=device), past)
        padded = new_past(model.config)
        run(model, torch.tensor([[0, 0, 1]], device=device), torch.tensor([[0, 1, 1]], device=device), padded)
        for i, layer in enumerate(past.layers):
            for states, after_pad in zip(_kept(layer), _kept(padded.layers[i]), strict=True):
                if states is None or states.ndim != 4 or states.shape[0] != 2 or states.shape[2] != 2:
                    shape = None if states is None else tuple(states.shape)
                    raise ValueError(f"layer {i} of {name} keeps {shape} of two prompts of two tokens each")
                first, second = states[:, :, 0].float()
                tolerance = torch.finfo(states.dtype).eps ** 0.5 * float(states.abs().max())
                if not torch.allclose(first, second, rtol=0.0, atol=tolerance):
                    raise ValueError(
                        f"{name} is not causal: layer {i} changes the keys of a prefix with the tokens after it"
                    )
                if not torch.allclose(states[:1].float(), after_pad[:, :, 1:].float(), rtol=0.0, atol=tolerance):
                    self.padding_matters = True
        return past

    def check_repeatable(self, model: Any) -> None:
        """Raise ValueError if a token's keys and values depend on the tokens that are computed with it.

        Runs three short forwards. No hit of such a model could be verified.
        """
        device = model.get_input_embeddings().weight.device
        ids = torch.arange(self._NUM_REPEATED, device=device)[None] % model.get_input_embeddings().num_embeddings
        mask, half = torch.ones_like(ids), self._NUM_REPEATED // 2
        whole, parts = new_past(model.config), new_past(model.config)
        run(model, ids, mask, whole)
        for length in (half, self._NUM_REPEATED):
            run(model, ids[:, :length], mask[:, :length], parts)
        stored = [self._states(whole, piece)[:, :, half:] for piece in self.pieces]
        if not self.agrees(Hit(parts, half, self._NUM_REPEATED, [0], stored)):
            raise ValueError(
                f"{type(model).__name__} computes other keys and values for a token if other tokens are computed with "
                "it, as dynamically quantized layers do, so no hit can be verified: verify=False reuses blocks anyway"
            )

    def describe(self) -> str:
        """Return a text that identifies the layout."""
        return ";".join(f"{p.layer}.{p.part}:{p.num_heads}x{p.head_dim}:{p.dtype}" for p in self.pieces)

    def form(self) -> str:
        """Return the dtypes and devices of keys and values, as for a message."""
        return ", ".join(sorted({f"{piece.dtype} on {piece.device}" for piece in self.pieces}))

    def check(self, past: Any, num_rows: int) -> int:
        """Return the tokens in each row of `past`; ValueError if another model made it or it has dropped tokens."""
        layers = getattr(past, "layers", None)
        if layers is None or len(layers) != self.num_layers:
            held = type(past).__name__ if layers is None else f"{len(layers)} layers"
            raise ValueError(f"past must be a cache of {self.num_layers} layers, got {held}")
        length = int(past.get_seq_length())
        if length == 0:
            return 0
        for piece in self.pieces:
            layer = layers[piece.layer]
            states = layer.values if piece.part else layer.keys
            expected = (num_rows, piece.num_heads, length, piece.head_dim)
            if states is None or states.dtype != piece.dtype:
                dtype = None if states is None else states.dtype
                raise ValueError(f"layer {piece.layer} of past holds {dtype}, the model's holds {piece.dtype}")
            if tuple(states.shape) != expected:
                hint = ""
                if isinstance(layer, DynamicSlidingWindowLayer) and states.shape[2] < length:
                    hint = "; its window has dropped the rest: run the model with a cache of load() or new_past()"
                raise ValueError(
                    f"layer {piece.layer} of past must be of shape {expected}, got {tuple(states.shape)}{hint}"
                )
        return length

    def pack(self, past: Any, row: int, column: int, num_blocks: int) -> torch.Tensor:
        """Return consecutive blocks of one row of a cache that `check` has accepted, the first at `column`.

        They are a copy on the model's device: int8, shape (num_blocks, block_bytes).
        """
        blocks = torch.zeros((num_blocks, self.block_bytes), dtype=torch.int8, device=self._device)
        for piece in self.pieces:
            tokens = self._states(past, piece)[row, :, column : column + num_blocks * self.block_size]
            self._view(blocks, piece).copy_(self._cut(tokens))
        return blocks

    def unpack(self, rows: list[torch.Tensor], num_pads: list[int], start: int, length: int) -> Hit:
        """Build a cache from each row's blocks, int8, shape (num_blocks, block_bytes): as many as reach `length`.

        The cache holds `start` columns at first, and is compared up to column `length`.
        """
        past = new_past(self.config)
        states: list[torch.Tensor] = []
        moved: dict[torch.device, list[torch.Tensor]] = {}
        for piece in self.pieces:
            if piece.device not in moved:
                moved[piece.device] = [blocks.to(piece.device) for blocks in rows]
            # The last block may extend beyond `length`: allocate all of it, and give the model a narrower view.
            room = length + self.block_size
            tensor = torch.empty(
                (len(rows), piece.num_heads, room, piece.head_dim), dtype=piece.dtype, device=piece.device
            )
            for row, blocks in enumerate(moved[piece.device]):
                num_blocks, pad = len(blocks), min(num_pads[row], length)
                tensor[row, :, :pad].zero_()
                if num_blocks:
                    tokens = tensor[row, :, pad : pad + num_blocks * self.block_size]
                    self._cut(tokens).copy_(self._view(blocks, piece))
            states.append(tensor[:, :, :length])
            if piece.part and start:
                past.update(states[-2][:, :, :start], states[-1][:, :, :start], piece.layer)
        return Hit(past, start, length, num_pads, [tensor[:, :, start:] for tensor in states])

    def agrees(self, hit: Hit) -> bool:
        """Return whether the model's keys and values equal the stored ones of a hit, except for rounding.

        In a model with experts, up to half of the tokens of every layer and row may differ by more.
        """
        columns = torch.arange(hit.start, hit.length)
        is_token = torch.stack([columns >= pads for pads in hit.num_pads])
        verdicts = []
        for piece, stored in zip(self.pieces, hit.stored, strict=True):
            computed = self._states(hit.past, piece)[:, :, hit.start : hit.length]
            if computed.shape != stored.shape:
                return False
            error = torch.linalg.vector_norm(computed.float() - stored.float(), dim=(1, 3))
            size = torch.linalg.vector_norm(stored.float(), dim=(1, 3))
            # Not ">": NaN must count as a difference.
            tokens = is_token.to(error.device)
            differs = ~(error <= _tolerance(piece.dtype) * size) & tokens
            if self._is_routed:
                differs = 2 * differs.sum(1) > tokens.sum(1)
            verdicts.append(differs.any().to(self._device))
        return not torch.stack(verdicts).any().item()

    def _states(self, past: Any, piece: Piece) -> torch.Tensor:
        """Return one layer's keys or values in a cache."""
        layer = past.layers[piece.layer]
        states: torch.Tensor = layer.values if piece.part else layer.keys
        return states

    def _view(self, blocks: torch.Tensor, piece: Piece) -> torch.Tensor:
        """View one layer's keys or values in blocks: shape (num_blocks, num_heads, block_size, head_dim)."""
        flat = blocks[:, piece.start : piece.stop].view(piece.dtype)
        return flat.view(len(blocks), piece.num_heads, self.block_size, piece.head_dim)

    def _cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """View tokens, shape (num_heads, n * block_size, head_dim), in the shape that `_view` returns."""
        num_heads, _, head_dim = tokens.shape
        return tokens.view(num_heads, -1, self.block_size, head_dim).transpose(0, 1)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative distance of two vectors whose sums were taken in different orders.

    In 32 layers of random weights the distance is about a sixth of this in float32, bfloat16 and float16.
    """
    eps = torch.finfo(dtype).eps
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        eps = 2.0**-10  # of TF32; products of bfloat16 are not so exact, nor allowed by default
    return float(4 * eps**0.75)


def _kept(layer: Any) -> tuple[Any, ...]:
    """Return a layer's keys and values, or nothing if it stores none of its own."""
    return () if type(layer) is _DummyLayer else (layer.keys, layer.values)


def _rope_types(parameters: Any) -> list[str]:
    """Return every rope type in a config; some configs have one per kind of layer."""
    if not isinstance(parameters, dict):
        return []
    types = [parameters["rope_type"]] if "rope_type" in parameters else []
    return types + [rope_type for value in parameters.values() for rope_type in _rope_types(value)]
