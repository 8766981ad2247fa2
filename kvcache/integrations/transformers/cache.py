"""PrefixCache: what `model.generate` has computed for one prompt serves the next prompt that begins alike.

The bookkeeping is a manager's, the bytes are in a `HostPool`; here stands only what is particular to transformers.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.integrations.transformers.identity import ModelIdentity
from kvcache.integrations.transformers.layout import KVLayout, new_past
from kvcache.integrations.transformers.rows import Row, checked_generation, read_rows
from kvcache.keys import block_keys, key_seed
from kvcache.metrics import ManagerStats
from kvcache.options import check_int, parse_size
from kvcache.recorder.recorder import Recorder
from kvcache.registry import POLICIES
from kvcache.request import ReqContext, Retention, check_next_use
from kvcache.transfer.host_pool import HostPool

# Before 5.21, generate(prefill_chunk_size=...) computes the prompt anew behind a prefix that it is given.
OLDEST, NEWEST = (5, 21), (5, 23)
"""The first and the last release (major, minor) of transformers that this was tried with."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """What a prefix cache has spared so far.

    Parameters
    ----------
    prompt_tokens : int
        Tokens of all prompts that `load` and `generate` were asked for, padding excluded.
    loaded_tokens : int
        Those of them whose keys and values were loaded, not computed.
    blocks : ManagerStats
        The manager's own counters.
    """

    prompt_tokens: int
    loaded_tokens: int
    blocks: ManagerStats

    @property
    def hit_rate(self) -> float:
        """Loaded tokens per prompt token; 0.0 before the first prompt."""
        return self.loaded_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixCache:
    """Keep prompts' keys and values in host memory, block by block, for one model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder in evaluation mode, of full-attention and sliding-window layers only. One forward over two tokens
        is run here, to see what its cache holds.
    num_blocks : int, optional
        Blocks to keep, >= 1.
    memory : int or str, optional
        Instead of `num_blocks`: bytes of host memory, as a number or as ``"2GiB"`` (`kvcache.options.parse_size`).
    policy : str or type
        Which blocks leave when it is full: a policy's name, class or ``"package.module:Class"``.
    block_size : int
        Tokens of one block, >= 1.
    record : path-like, optional
        The file that the manager's calls are recorded to (`kvcache.Recorder`).
    fingerprint : str, optional
        What names the weights, such as ``"org/model@revision"``; None: a digest of all of them. Config, buffers and
        attributes of the modules are looked at in either case.

    Raises
    ------
    ValueError
        An argument is bad, there is no room for a single block, or the model's cache cannot be cut at a block.
    RuntimeError
        This release of transformers was never tried.

    Notes
    -----
    A key is a SHA-256 over all token ids up to its block's end, and over the model's fingerprint, dtype and layout, the
    block size, the adapter and the salt: whatever differs in one of them is a miss. Methods may be called from several
    threads. What is stored lives as long as this object: nothing is kept over a restart.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        policy: str | type = "lru",
        block_size: int = 16,
        fingerprint: str | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_release(transformers.__version__)
        check_int("block_size", block_size)
        if not hasattr(model, "named_modules") or not hasattr(model, "generate"):
            raise ValueError(
                f"model must be a transformers model that generates, got {model!r}; load it first: "
                "AutoModelForCausalLM.from_pretrained(...)"
            )
        if model.training:
            raise ValueError("the model is in training mode, and dropout would be stored: call model.eval() first")
        self.model = model
        self.block_size = block_size
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._layout = KVLayout(model, block_size)
        self._identity = ModelIdentity(model, fingerprint)
        self.num_blocks = _num_blocks(num_blocks, memory, self._layout.block_bytes, block_size)
        policy = POLICIES.resolve(policy)
        # The pool looks first whether there is so much memory; a policy's own tables are a small part of it.
        self._pool = HostPool(self.num_blocks, self._layout.block_bytes)
        self.manager = CPUOffloadingManager(block_size, self.num_blocks, policy)
        if record is not None:
            Recorder(self.manager, record)
        # A block found must still be there when it is pinned.
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._loaded_tokens = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: every layer's keys and values of `block_size` tokens."""
        return self._layout.block_bytes

    def new_past(self) -> DynamicCache:
        """Return an empty cache for the model, one that `store` can read whatever the length of the prompt."""
        return new_past(self.model.config)

    def load(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str | bytes = "",
        adapter: str = "",
        next_use: str | None = None,
    ) -> tuple[DynamicCache, int]:
        """Return the longest stored prefix of a batch of prompts.

        Parameters
        ----------
        input_ids : torch.Tensor
            Token ids, shape (batch, columns).
        attention_mask : torch.Tensor, optional
            Same shape, 0 where there is padding, on the left; None: there is none.
        salt : str or bytes
            Whose prompts these are: what was stored under another salt is not found.
        adapter : str
            Names weights that are added to the model's, beyond the adapters of peft, which are seen by themselves.
        next_use : str, optional
            When these prompts will be continued: ``"end"`` (never), ``"soon"`` (by a tool) or ``"later"`` (by a
            person); see `Retention`.

        Returns
        -------
        past : DynamicCache
            A copy of the stored keys and values, to be given to the model with the whole of `input_ids` (`generate`)
            or with ``input_ids[:, n:]`` (a forward).
        n : int
            Columns of `input_ids` that `past` holds: in a batch, those that every row has. At least one is left out,
            for the model to compute the next token from.

        Raises
        ------
        ValueError
            The ids or the mask are not of that form, an id is outside the vocabulary, or the next use is none of the
            three.
        """
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        with _Requests(self, rows, salt, adapter, next_use) as requests:
            return self._load(rows, requests)

    def store(
        self,
        input_ids: torch.Tensor,
        past: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str | bytes = "",
        adapter: str = "",
        next_use: str | None = None,
    ) -> int:
        """Keep the whole blocks of `input_ids` whose keys and values are in `past`.

        Parameters
        ----------
        input_ids : torch.Tensor
            Token ids, shape (batch, columns), of prompts with or without what was generated after them.
        past : DynamicCache
            What the model has computed for these very ids, in `load`'s cache or in `new_past`'s. It may hold fewer
            columns or more.
        attention_mask : torch.Tensor, optional
            As in `load`.
        salt, adapter, next_use
            As in `load`.

        Returns
        -------
        int
            Blocks that were not there before. Where there is no room for all, the first ones are kept.

        Raises
        ------
        ValueError
            `past` is not of this model, or the ids or the mask are not as in `load`.
        """
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        with _Requests(self, rows, salt, adapter, next_use) as requests:
            return self._store(rows, requests, past)

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str | bytes = "",
        adapter: str = "",
        next_use: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate with what is stored, and store what was computed.

        Parameters
        ----------
        input_ids, attention_mask, salt, adapter, next_use
            As in `load`.
        **kwargs
            For `model.generate`: greedy search and sampling of one sequence a prompt.

        Returns
        -------
        torch.Tensor or transformers.utils.ModelOutput
            As `model.generate` returns it.

        Raises
        ------
        ValueError
            As in `load`; or an argument asks for another way to generate, or changes keys and values by something
            that is not in the token ids (images, embeddings, positions).
        RuntimeError
            `model.generate` has not used the loaded prefix as it should.
        """
        config = checked_generation(self.model, input_ids, attention_mask, kwargs)
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with _Requests(self, rows, salt, adapter, next_use) as requests:
            past, _ = self._load(rows, requests)
            output = self.model.generate(input_ids=input_ids, attention_mask=mask, past_key_values=past, **kwargs)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            # The last token is never fed to the model. Any other length: it did not go on from where `past` ended.
            if past.get_seq_length() != sequences.shape[1] - 1:
                raise RuntimeError(
                    f"generate() left {past.get_seq_length()} columns of keys and values for {sequences.shape[1]} "
                    "tokens: what it returned is not to be trusted"
                )
            generated = sequences[:, input_ids.shape[1] :].cpu().numpy()
            rows = [
                Row(row.num_pads, np.concatenate([row.ids, _without_padding(new, config)]))
                for row, new in zip(rows, generated, strict=True)
            ]
            requests.extend(rows)
            self._store(rows, requests, past)
        return output

    def hint(
        self,
        input_ids: torch.Tensor,
        next_use: str,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str | bytes = "",
        adapter: str = "",
    ) -> None:
        """Say when stored prompts will be continued, once that is known.

        Parameters
        ----------
        input_ids : torch.Tensor
            Token ids as they were given to `store`, or as `generate` returned them.
        next_use : str
            ``"end"``, ``"soon"`` or ``"later"``.
        attention_mask, salt, adapter
            As in `load`.

        Raises
        ------
        ValueError
            As in `load`; nothing has changed.
        """
        check_next_use(next_use)
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        for keys, _ in _Requests(self, rows, salt, adapter, None).each():
            self.manager.hint(keys, next_use)

    def clear(self) -> None:
        """Forget every block; no other thread may be in a call."""
        self.manager.reset_cache()

    def stats(self) -> PrefixCacheStats:
        """Return counters since the start."""
        return PrefixCacheStats(self._prompt_tokens, self._loaded_tokens, self.manager.stats())

    def _load(self, rows: list[Row], requests: _Requests) -> tuple[DynamicCache, int]:
        self._prompt_tokens += sum(len(row.ids) for row in rows)
        found: list[list[bytes]] = []
        specs: list[Any] = []
        columns = rows[0].num_pads + len(rows[0].ids)
        try:
            with self._lock:
                ready = [self.manager.lookup(keys, context) for keys, context in requests.each()]
                length = min(row.num_pads + hits * self.block_size for row, hits in zip(rows, ready, strict=True))
                length = min(length, columns - 1)
                widths = [max(0, length - row.num_pads) for row in rows]
                if not any(widths):
                    return self.new_past(), 0
                for width, (keys, context) in zip(widths, requests.each(), strict=True):
                    wanted = keys[: -(-width // self.block_size)]
                    specs.append(self.manager.prepare_load(wanted, context))
                    found.append(wanted)
            blocks = [self._read(spec) for spec in specs]
            past = self._layout.unpack(blocks, [row.num_pads for row in rows], length)
        finally:
            for keys, (_, context) in zip(found, requests.each(), strict=False):
                self.manager.complete_load(keys, context)
        self._loaded_tokens += sum(widths)
        return past, length

    def _store(self, rows: list[Row], requests: _Requests, past: DynamicCache) -> int:
        length = self._layout.check(past, len(rows))
        num_stored = 0
        for i, (row, (keys, context)) in enumerate(zip(rows, requests.each(), strict=True)):
            num_whole = max(0, length - row.num_pads) // self.block_size
            keys = keys[: min(num_whole, self.num_blocks)]
            with self._lock:
                output = self.manager.prepare_store(keys, context)
            if output is None or not output.keys_to_store:
                continue
            written = False
            try:
                position = {key: i for i, key in enumerate(keys)}
                self._write(past, i, row.num_pads, [position[key] for key in output.keys_to_store], output.store_spec)
                written = True
            finally:
                self.manager.complete_store(output.keys_to_store, context, written)
            num_stored += len(output.keys_to_store)
        return num_stored

    def _read(self, spec: Any) -> torch.Tensor:
        runs = [self._pool.tensor[first:stop] for first, stop in _runs(spec.block_ids)]
        return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else self._pool.tensor[:0]

    def _write(self, past: DynamicCache, row: int, num_pads: int, positions: list[int], spec: Any) -> None:
        packed = [
            self._layout.pack(past, row, num_pads + first * self.block_size, stop - first)
            for first, stop in _runs(np.asarray(positions))
        ]
        blocks = packed[0] if len(packed) == 1 else torch.cat(packed)
        done = 0
        for first, stop in _runs(spec.block_ids):
            self._pool.tensor[first:stop].copy_(blocks[done : done + stop - first])
            done += stop - first


class _Requests:
    """A batch's rows as the manager sees them: each one's keys and its context, which ends with the `with` block."""

    def __init__(
        self, cache: PrefixCache, rows: list[Row], salt: str | bytes, adapter: str, next_use: str | None
    ) -> None:
        if type(salt) not in (str, bytes):
            raise ValueError(f"salt must be str or bytes, got {salt!r}")
        if type(adapter) is not str:
            raise ValueError(f"adapter must be a str, got {adapter!r}")
        self._manager = cache.manager
        self._block_size = cache.block_size
        self._seed = key_seed(cache._identity.fingerprint(), cache._layout.describe(), cache.block_size, adapter, salt)
        retention = None if next_use is None else Retention(next_use=next_use)
        self._contexts = [ReqContext(retention=retention) for _ in rows]
        self.extend(rows)

    def extend(self, rows: list[Row]) -> None:
        """Take the rows' keys anew: they have grown."""
        self._keys = [block_keys(row.ids, self._block_size, self._seed) for row in rows]

    def each(self) -> list[tuple[list[bytes], ReqContext]]:
        """Return each row's keys and context."""
        return list(zip(self._keys, self._contexts, strict=True))

    def __enter__(self) -> _Requests:
        for context in self._contexts:
            self._manager.on_new_request(context)
        return self

    def __exit__(self, *_: object) -> None:
        for context in self._contexts:
            self._manager.on_request_finished(context)


def _runs(ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Return the runs of consecutive ids as (first, stop), in order."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts, lasts = ids[np.r_[0, breaks]], ids[np.r_[breaks - 1, len(ids) - 1]]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def _without_padding(ids: Any, config: Any) -> Any:
    """Return what a row generated without the padding that fills it up behind its end."""
    if config.pad_token_id is None:
        return ids
    real = np.flatnonzero(ids != config.pad_token_id)
    return ids[: real[-1] + 1] if len(real) else ids[:0]


def _num_blocks(num_blocks: int | None, memory: int | str | None, block_bytes: int, block_size: int) -> int:
    if (num_blocks is None) == (memory is None):
        raise ValueError(f"give one of num_blocks and memory, got num_blocks={num_blocks!r}, memory={memory!r}")
    if num_blocks is not None:
        return check_int("num_blocks", num_blocks)
    num_bytes = parse_size("memory", memory)
    if num_bytes < block_bytes:
        raise ValueError(
            f"memory={memory!r} has no room for a block: {block_size} tokens of this model take {block_bytes} bytes"
        )
    return num_bytes // block_bytes


def _check_release(version: str) -> None:
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        tried = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        raise RuntimeError(f"transformers {version} was never tried with kvcache; {tried} were")
