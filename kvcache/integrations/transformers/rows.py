"""A batch of prompts, checked: ids in the vocabulary, padding on the left only, one sequence generated for each."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

_GENERATE_ARGUMENTS = {
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "tokenizer",
    *vars(GenerationConfig()),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch: the number of padding columns, and the ids after them."""

    num_pads: int
    ids: npt.NDArray[np.int64]


def read_rows(input_ids: Any, attention_mask: Any, vocab_size: int) -> list[Row]:
    """Return a batch's rows.

    `input_ids` are integers below `vocab_size`, shape (batch, columns). `attention_mask`, if given, has the same shape
    and is 0 where there is padding, which must stand on the left. Anything else is a ValueError.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or 0 in input_ids.shape:
        shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else input_ids
        raise ValueError(f"input_ids must be a tensor of shape (batch, columns), neither 0, got {shape!r}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32, got {input_ids.dtype}")
    # An id outside the embedding would stop a device with an assertion.
    ids = input_ids.detach().cpu().numpy().astype(np.int64, copy=False)
    outside = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(outside):
        row, column = outside[0].tolist()
        raise ValueError(
            f"token id {ids[row, column]} at row {row}, column {column} is outside the vocabulary, 0..{vocab_size - 1}"
        )
    num_pads = np.zeros(len(ids), np.int64)
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
            shape = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
            raise ValueError(f"attention_mask must have the shape of input_ids, {ids.shape}, got {shape!r}")
        mask = attention_mask.detach().cpu().numpy() != 0
        num_pads = np.where(mask.any(axis=1), mask.argmax(axis=1), ids.shape[1])
        for row, pads in enumerate(num_pads.tolist()):
            if pads == ids.shape[1] or not mask[row, pads:].all():
                raise ValueError(
                    f"row {row} of attention_mask must be zeros, then ones: padding stands on the left, before a prompt"
                )
    return [Row(pads, ids[row, pads:]) for row, pads in enumerate(num_pads.tolist())]


def checked_generation(model: Any, input_ids: Any, attention_mask: Any, kwargs: dict[str, Any]) -> GenerationConfig:
    """Return the generation config in force, if the call generates one sequence a prompt from token ids alone."""
    for name, value in kwargs.items():
        if value is not None and name not in _GENERATE_ARGUMENTS:
            raise ValueError(f"generate({name}=...) is not supported: block keys depend on token ids only")
    if model.training:
        raise ValueError("the model is in training mode, and dropout would be stored: call model.eval() first")
    config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
    config.update(**{name: value for name, value in kwargs.items() if name != "generation_config"})
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r} is not supported, only greedy search and sampling")
    for name, required in (("num_return_sequences", (None, 1)), ("use_cache", (None, True))):
        if getattr(config, name) not in required:
            raise ValueError(f"generate({name}={getattr(config, name)!r}) is not supported")
    for name in ("cache_implementation", "token_healing"):
        if getattr(config, name):
            raise ValueError(f"generate({name}={getattr(config, name)!r}) is not supported")
    pad, eos = config.pad_token_id, config.eos_token_id
    # generate() treats such ids as padding at any position.
    guesses = attention_mask is None and pad is not None and pad not in (eos if isinstance(eos, list) else [eos])
    if guesses and (input_ids == pad).any():
        raise ValueError(f"input_ids hold the padding token {pad}: pass attention_mask to mark the padding")
    return config
