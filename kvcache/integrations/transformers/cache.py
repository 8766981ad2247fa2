"""PrefixCache: `model.generate` reuses the keys and values of an earlier prompt with the same prefix.

A manager keeps the books and a `HostPool` the bytes; this module holds the parts that are specific to transformers.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache
from transformers.generation import LogitsProcessorList

from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.integrations.transformers.identity import ModelIdentity
from kvcache.integrations.transformers.layout import CACHE_ARGUMENT, Hit, KVLayout, new_past, run
from kvcache.integrations.transformers.rows import Row, checked_generation, read_rows
from kvcache.keys import block_keys, key_seed
from kvcache.metrics import ManagerStats
from kvcache.options import check_int, parse_size
from kvcache.registry import POLICIES
from kvcache.request import ReqContext, Retention, check_next_use
from kvcache.transfer.host_pool import HostPool

_LOG = logging.getLogger(__name__)
# Before 5.21, generate(prefill_chunk_size=...) computes the whole prompt again after a loaded prefix.
OLDEST, NEWEST = (5, 21), (5, 24)
"""The first and the last release (major, minor) of transformers that was tried; the next one is accepted, too."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counters of a prefix cache since its start.

    `prompt_tokens` are those of all prompts that `load` and `generate` were asked for, without padding, and
    `loaded_tokens` those of them whose keys and values were loaded, not computed. `rejected_hits` are hits whose last
    block, computed again, differed from the stored one: the model had changed. `blocks` are the manager's own counters.
    """

    prompt_tokens: int
    loaded_tokens: int
    rejected_hits: int
    blocks: ManagerStats

    @property
    def hit_rate(self) -> float:
        """Loaded tokens per prompt token; 0.0 before the first prompt."""
        return self.loaded_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixCache:
    """Keep the keys and values of one model's prompts in host memory, block by block.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder in evaluation mode with full-attention and sliding-window layers only. Up to five short forwards run
        here, to measure the layout of its cache and whether hits can be verified.
    num_blocks : int, optional
        Blocks to keep, >= 1.
    memory : int or str, optional
        Instead of `num_blocks`: bytes of host memory, as a number or as ``"2GiB"`` (`kvcache.options.parse_size`).
    policy : str or type
        Chooses the blocks to evict: a policy's name, class or ``"package.module:Class"``.
    block_size : int
        Tokens of one block, >= 1.
    record : path-like, optional
        File to record the manager's calls to (`kvcache.Recorder`).
    fingerprint : str, optional
        Identifies the weights, such as ``"org/model@revision"``; parameters are not looked at then. Needed if they are
        not in memory between forwards.
    verify : bool
        Whether the last block of every hit is computed again, in the same forward as the rest of the prompt, and
        compared with the stored one. If they differ, no block stored before is used again.

    Raises
    ------
    ValueError
        An argument is invalid, the memory does not hold one block, the model's cache cannot be cut at a block, or it
        computes a token's keys and values from the tokens computed with it (dynamic quantization) and `verify` is on.
    RuntimeError
        This release of transformers has not been tried, and is not the one after the last that was.

    Notes
    -----
    A key is a SHA-256 over all token ids up to its block's end, and over the model's fingerprint, dtype and layout, the
    block size, the adapter and the salt: a difference in one of them is a miss. Methods may be called from several
    threads. Blocks live as long as this object; a restart loses them.
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
        verify: bool = True,
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
        self.verify = verify
        self.block_size = block_size
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._layout = KVLayout(model, block_size)
        if verify:
            self._layout.check_repeatable(model)
        self._identity = ModelIdentity(model, fingerprint)
        # For each of them the layout was measured, and is this one.
        self._forms = {self._identity.forms}
        self.num_blocks = _num_blocks(num_blocks, memory, self._layout.block_bytes, block_size)
        path = None if record is None else os.fspath(record)
        settings = OffloadSettings.parse({"cache_policy": POLICIES.resolve(policy), "record": path}, "PrefixCache")
        # The pool comes first: it checks that the memory exists, and is much larger than the tables of a policy.
        self._pool = HostPool(self.num_blocks, self.block_bytes)
        self.manager = open_manager(
            settings, block_size=block_size, num_blocks=self.num_blocks, block_bytes=self.block_bytes
        )
        # No other thread may evict a block between its look-up and its pin.
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._loaded_tokens = 0
        self._rejected_hits = 0

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
            Same shape, 0 for padding, which must be on the left; None: no padding.
        salt : str or bytes
            The tenant: blocks stored with another salt are not found.
        adapter : str
            Names weights added to the model's. Adapters of peft need no name; they are detected.
        next_use : str, optional
            When these prompts will be continued: ``"end"`` (never), ``"soon"`` (by a tool) or ``"later"`` (by a
            person); see `Retention`.

        Returns
        -------
        past : DynamicCache
            A copy of the stored keys and values, for `generate` with all of `input_ids` or for a forward with
            ``input_ids[:, n:]``.
        n : int
            Columns of `input_ids` that `past` holds; in a batch, the columns stored for every row. At least one is
            left out, because the model computes the next token from it.

        Raises
        ------
        ValueError
            The ids or the mask have another form, an id is outside the vocabulary, or the next use is invalid.
        """
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with _Requests(self, rows, salt, adapter, next_use) as requests:
            hit = self._load(rows, requests)
            if hit.start < hit.length:
                run(self.model, input_ids[:, : hit.length], mask[:, : hit.length], hit.past)
                if not self._layout.agrees(hit):
                    self._reject(hit, requests)
                    return self.new_past(), 0
            return hit.past, hit.length

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
        """Store the whole blocks of `input_ids` whose keys and values are in `past`.

        Parameters
        ----------
        input_ids : torch.Tensor
            Token ids, shape (batch, columns), of prompts with or without generated tokens.
        past : DynamicCache
            The keys and values of these ids, in a cache returned by `load` or `new_past`. It may hold fewer columns or
            more.
        attention_mask : torch.Tensor, optional
            As in `load`.
        salt, adapter, next_use
            As in `load`.

        Returns
        -------
        int
            Blocks that were stored now. If the pool is full, the first ones are stored.

        Raises
        ------
        ValueError
            `past` is not a cache of this model, or the ids or the mask are invalid as in `load`.
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
        """Generate from the longest stored prefix, and store the computed blocks.

        Parameters
        ----------
        input_ids, attention_mask, salt, adapter, next_use
            As in `load`.
        **kwargs
            For `model.generate`: greedy search or sampling of one sequence per prompt.

        Returns
        -------
        torch.Tensor or transformers.utils.ModelOutput
            As `model.generate` returns it.

        Raises
        ------
        ValueError
            As in `load`; or an argument asks for another generation mode, or makes keys and values depend on more than
            token ids (images, embeddings, positions).
        RuntimeError
            `model.generate` did not continue from the loaded prefix.
        """
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        config = checked_generation(self.model, input_ids, attention_mask, kwargs)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids) if attention_mask is None else attention_mask,
        }
        with _Requests(self, rows, salt, adapter, next_use) as requests:
            hit = self._load(rows, requests)
            past = hit.past
            try:
                processors = kwargs.get("logits_processor") or []
                if hit.start < hit.length:
                    # It is called after the prompt was computed and before a token is chosen.
                    processors = LogitsProcessorList([_Check(self._layout, hit), *processors])
                output = self.model.generate(
                    **inputs, **{**kwargs, CACHE_ARGUMENT: past, "logits_processor": processors}
                )
            except _Differs:
                self._reject(hit, requests)
                past = self.new_past()
                if kwargs.get("streamer") is not None:
                    kwargs["streamer"] = _AfterPrompt(kwargs["streamer"])
                output = self.model.generate(**inputs, **{**kwargs, CACHE_ARGUMENT: past})
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            # The model never reads the last token. With any other length, it did not continue where `past` ended.
            if past.get_seq_length() != sequences.shape[1] - 1:
                raise RuntimeError(
                    f"generate() left {past.get_seq_length()} columns of keys and values for {sequences.shape[1]} "
                    "tokens: its output cannot be trusted"
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
        """Report when stored prompts will be continued: `next_use` is ``"end"``, ``"soon"`` or ``"later"``.

        `input_ids` are those passed to `store` or returned by `generate`; `attention_mask`, `salt` and `adapter` are as
        in `load`, and so are the errors, after which nothing has changed.
        """
        check_next_use(next_use)
        rows = read_rows(input_ids, attention_mask, self._vocab_size)
        for keys, _ in _Requests(self, rows, salt, adapter, None).each():
            self.manager.hint(keys, next_use)

    def clear(self) -> None:
        """Drop every block. No other thread may be in a call."""
        self.manager.reset_cache()

    def stats(self) -> PrefixCacheStats:
        """Return the counters since the start."""
        return PrefixCacheStats(self._prompt_tokens, self._loaded_tokens, self._rejected_hits, self.manager.stats())

    def _load(self, rows: list[Row], requests: _Requests) -> Hit:
        self._prompt_tokens += sum(len(row.ids) for row in rows)
        pinned: list[list[bytes]] = []
        specs: list[Any] = []
        columns, num_pads = rows[0].num_pads + len(rows[0].ids), [row.num_pads for row in rows]
        try:
            with self._lock:
                ready = [self.manager.lookup(keys, context) or 0 for keys, context in requests.each()]
                length = min(pads + hits * self.block_size for pads, hits in zip(num_pads, ready, strict=True))
                length = min(length, columns - 1)
                if length <= min(num_pads):
                    return Hit(self.new_past(), 0, 0, num_pads, [])
                for pads, (keys, context) in zip(num_pads, requests.each(), strict=True):
                    needed = keys[: -(-max(0, length - pads) // self.block_size)]
                    specs.append(self.manager.prepare_load(needed, context))
                    pinned.append(needed)
            blocks = [self._read(spec) for spec in specs]
            start = max(0, length - self.block_size) if self.verify else length
            hit = self._layout.unpack(blocks, num_pads, start, length)
        finally:
            for keys, (_, context) in zip(pinned, requests.each(), strict=False):
                self.manager.complete_load(keys, context)
        self._loaded_tokens += hit.num_tokens
        return hit

    def _reject(self, hit: Hit, requests: _Requests) -> None:
        """Count a hit that differs from what the model computes now, and let no older block be found again."""
        if not self._rejected_hits:
            _LOG.warning(
                "%s no longer computes the keys and values that were stored: it has changed in a way that its config, "
                "tensors and attributes do not show, or its kernels depend on the length of a prompt. What was stored "
                "is dropped; this is counted in rejected_hits",
                type(self.model).__name__,
            )
        self._rejected_hits += 1
        self._loaded_tokens -= hit.num_tokens
        self._identity.forget(requests.generation)
        requests.rekey()

    def _check_forms(self) -> None:
        """Raise ValueError if the model computes keys and values of another dtype or device than at the start."""
        if self._identity.forms in self._forms:
            return
        layout = KVLayout(self.model, self.block_size)
        if layout.pieces != self._layout.pieces:
            raise ValueError(
                f"the model's keys and values were {self._layout.form()} at the start and are {layout.form()} now: "
                "make another PrefixCache for it"
            )
        self._forms.add(self._identity.forms)

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
        parts = [part for first, stop in _runs(spec.block_ids) for part in self._pool.parts(first, stop)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._pool.flat[:0]
        return whole.view(-1, self.block_bytes)

    def _write(self, past: DynamicCache, row: int, num_pads: int, positions: list[int], spec: Any) -> None:
        packed = [
            self._layout.pack(past, row, num_pads + first * self.block_size, stop - first)
            for first, stop in _runs(np.asarray(positions))
        ]
        rest = (packed[0] if len(packed) == 1 else torch.cat(packed)).view(-1)
        for first, stop in _runs(spec.block_ids):
            for part in self._pool.parts(first, stop):
                part.copy_(rest[: len(part)])
                rest = rest[len(part) :]


class _Requests:
    """The rows of a batch as requests of the manager: keys and a context each, open during the `with` block."""

    def __init__(
        self, cache: PrefixCache, rows: list[Row], salt: str | bytes, adapter: str, next_use: str | None
    ) -> None:
        if type(salt) not in (str, bytes):
            raise ValueError(f"salt must be str or bytes, got {salt!r}")
        if type(adapter) is not str:
            raise ValueError(f"adapter must be a str, got {adapter!r}")
        self._cache = cache
        self._rows = rows
        self._names = adapter, salt
        retention = None if next_use is None else Retention(next_use=next_use)
        self._contexts = [ReqContext(retention=retention) for _ in rows]
        self.rekey()

    def rekey(self) -> None:
        """Make the keys of the rows for the current state of the model."""
        identity = self._cache._identity
        fingerprint = identity.fingerprint()
        self.generation = identity.generation
        # Before the model computes an answer of which nothing could be stored.
        self._cache._check_forms()
        parts = fingerprint, self._cache._layout.describe(), self._cache.block_size, *self._names
        matters = self._cache._layout.padding_matters
        self._seeds = [key_seed(*parts, row.num_pads if matters else 0) for row in self._rows]
        self._digests = [identity.row_digests(row.ids, 0) for row in self._rows]
        self.extend(self._rows)

    def extend(self, rows: list[Row]) -> None:
        """Make the keys of rows that have grown."""
        self._rows = rows
        self._keys = []
        for i, (row, seed) in enumerate(zip(rows, self._seeds, strict=True)):
            digests, parts = self._digests[i], [row.ids]
            if digests is not None:
                # Those of the prompt stay: they describe the embeddings that its blocks were computed with.
                added = self._cache._identity.row_digests(row.ids[len(digests) :], len(digests))
                digests = self._digests[i] = digests if added is None else np.concatenate([digests, added])
                parts += [digests & 0xFFFFFFFF, digests >> 32 & 0xFFFFFFFF]
            self._keys.append(block_keys(np.stack(parts, 1).ravel(), len(parts) * self._cache.block_size, seed))

    def each(self) -> list[tuple[list[bytes], ReqContext]]:
        """Return each row's keys and context."""
        return list(zip(self._keys, self._contexts, strict=True))

    def __enter__(self) -> _Requests:
        for context in self._contexts:
            self._cache.manager.on_new_request(context)
        return self

    def __exit__(self, *_: object) -> None:
        for context in self._contexts:
            self._cache.manager.on_request_finished(context)


class _Differs(Exception):
    """The model's keys and values differ from the stored ones."""


class _Check:
    """A logits processor that raises `_Differs` before the first token is chosen if the model disagrees with a hit."""

    def __init__(self, layout: KVLayout, hit: Hit) -> None:
        self._layout = layout
        self._hit: Hit | None = hit

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        hit, self._hit = self._hit, None
        if hit is not None and not self._layout.agrees(hit):
            raise _Differs
        return scores


class _AfterPrompt:
    """A streamer that skips the prompt, which an earlier `generate` has put already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_begun = False

    def put(self, value: Any) -> None:
        if self._has_begun:
            self._streamer.put(value)
        self._has_begun = True

    def end(self) -> None:
        self._streamer.end()


def _runs(ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Return the runs of consecutive ids as (first, stop), in order."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts, lasts = ids[np.r_[0, breaks]], ids[np.r_[breaks - 1, len(ids) - 1]]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def _without_padding(ids: Any, config: Any) -> Any:
    """Return a row's generated ids without the padding after its end."""
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
    if OLDEST <= release <= NEWEST:
        return
    tried = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    untried = f"transformers {version} has not been tried with kvcache; {tried} have"
    if release != (NEWEST[0], NEWEST[1] + 1):
        raise RuntimeError(untried)
    _LOG.warning("%s: compare a few answers with those of the model without the cache", untried)
