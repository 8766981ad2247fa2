"""The base of tiers on a store that engines share: names, seals and epochs, the same for every store.

A store is a subclass with five methods: read the epoch, announce it, get, put, exists. It moves values under names that
this class makes, and hands each value's seal back; this class compares it.

Names are ``kvcache:<namespace>:<epoch>:<block key>``. The namespace is a keyed digest of the fingerprint (model, dtype,
geometry), the format and a tenant's salt, so engines share blocks only if the bytes mean the same. A value is a payload
and a seal over name and payload. A value that is foreign, short, long or torn is a counted miss and is deleted.

An epoch stands for weights (`kvcache.epoch`), so they are not part of the namespace. An engine begins in the epoch that
the store announces for its fingerprint. An operator may announce another one for later starts; blocks of other weights
do not verify there. A reset leaves it for the epoch of a version, or for a private one that is never announced. The
blocks of a private epoch are deleted after its engine has left it: serving neither waits for a deletion nor fails with
it. Blocks of other epochs may be in use, and the store evicts them. If the store has forgotten the announced epoch, a
running engine announces it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hmac import compare_digest
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.epoch import Epoch, EpochKind, without_weights
from kvcache.options import (
    LEAST_SALT,
    Component,
    Options,
    option,
    parse_duration,
    parse_salt,
    parse_size,
    parse_threads,
)
from kvcache.tiers.base.checksum import key_prefix, wide_checksum
from kvcache.tiers.base.codec import make_codec, parse_codec, stored_form
from kvcache.tiers.base.job_tier import BlockOutcome, JobTier, TierBatch
from kvcache.tiers.base.log_limiter import LogLimiter

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks, TierStats

    Seal = bytes | bytearray | memoryview

_LOG = logging.getLogger(__name__)
SEAL_BYTES = 16
_PROBE_BYTES = 4096
_DELETE_S = 2.0
"""How long `maintain` deletes private blocks; a reset may wait for it."""
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 3600.0
"""Time until a failed deletion is tried again; it doubles with each failure."""


class Namespace:
    """Names and seals of one model's blocks in a shared store.

    Engines agree on both if they agree on the format, the fingerprint, the size of a block and the salt. A seal covers
    the block's name, epoch included, and its payload. With a salt, it is a keyed BLAKE3 digest, which a client
    cannot forge without the salt. Otherwise, it is an xxh3, which detects accidents only. Names do not reveal its key.
    Each name in the store begins with `prefix`.
    """

    def __init__(self, store_format: bytes, fingerprint: Mapping[str, Any], block_bytes: int, salt: str) -> None:
        described = json.dumps(dict(fingerprint), sort_keys=True, default=str).encode()
        parts = b"".join(
            len(part).to_bytes(8, "big") + part for part in (store_format, described, str(block_bytes).encode())
        )
        secret = hashlib.blake2b(salt.encode()).digest()
        self.prefix = "kvcache:" + hashlib.blake2b(parts, key=secret, digest_size=16, person=b"name").hexdigest()
        self._key = hashlib.blake2b(parts, key=secret, digest_size=32, person=b"seal").digest()
        self._blake3: Any = None
        if salt:
            try:
                from blake3 import blake3
            except ImportError as error:
                raise ImportError(
                    f"a salt needs the package blake3: install kvcache's extra 'valkey', 'mooncake' or 's3' ({error})"
                ) from error
            self._blake3 = blake3

    def epoch_of(self, epoch: Epoch) -> str:
        """Return the part of names that stands for an epoch, 16 hexadecimal digits."""
        return epoch.digest(self._key).hex()

    def seal(self, name: bytes, payload: Seal) -> bytes:
        """Return the seal of the block that is stored as `name`, `SEAL_BYTES` bytes."""
        if self._blake3 is None:
            return wide_checksum(name, payload, int.from_bytes(self._key[:8], "big"))
        digest = self._blake3(key_prefix(name, len(payload)), key=self._key)
        digest.update(payload)
        return bytes(digest.digest(SEAL_BYTES))


@dataclass(frozen=True, kw_only=True)
class StoreOptions(Options):
    """The options of every store; those of one store are a subclass."""

    salt: str = option(parse_salt, "", when="tenants share the store: a secret of one tenant's engines")
    timeout_s: float = option(parse_duration, 5.0, when="a healthy store may take longer to answer, or must not")
    codec: Component | None = option(parse_codec, None, when="blocks must take fewer bytes, or be encrypted")
    num_threads: int = option(parse_threads, 2, when="so many requests under way do not fill the link", rare=True)
    max_queued_bytes: int = option(
        parse_size, 256 << 20, when="more, or fewer, bytes may be under way at a time", rare=True
    )


class SharedStoreTier(JobTier):
    """Keep blocks in a store that engines share; a subclass moves values.

    Parameters
    ----------
    options : StoreOptions
        With a salt, seals detect forgery, too. A query and the start wait `timeout_s` at most.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    fingerprint : mapping or None
        Identifies the model and the geometry of the blocks.
    medium : str
        The medium's name in events.
    store_format : bytes
        Name and version of the values' layout: engines of two formats share nothing.
    maintain_interval_s : float
        Time between looks at the announced epoch.
    **properties
        Further arguments of :py:class:`~kvcache.JobTier`.

    Attributes
    ----------
    block_bytes : int
        Bytes of a block without its seal of `SEAL_BYTES` bytes.
    prefix : bytes
        The start of all names of this model.

    Notes
    -----
    Call this constructor last in the subclass's own: it starts the threads. I/O threads call `get_values`,
    `put_values` and `are_held`, several at once. One thread at a time calls the others.
    """

    options_type = StoreOptions

    def __init__(
        self,
        options: StoreOptions,
        host_blocks: HostBlocks,
        fingerprint: Mapping[str, Any] | None,
        medium: str,
        store_format: bytes,
        *,
        maintain_interval_s: float = 5.0,
        **properties: Any,
    ) -> None:
        codec = make_codec(options.codec, host_blocks)
        self.block_bytes, described = stored_form(codec, host_blocks, fingerprint)
        self._namespace = Namespace(store_format, without_weights(described), self.block_bytes, options.salt)
        self.prefix = self._namespace.prefix.encode()
        self._start = Epoch.of(described)
        # Parts of names: the announced epoch of the fingerprint (empty until the store answers); that of a reset.
        self._announced = self._own = ""
        # The epoch of the last reset, and the number of stored blocks before it.
        self._reset: Epoch | None = None
        self._num_before = 0
        # The private epochs that this engine has left and whose blocks are not deleted yet, with the numbers of blocks.
        self._left: deque[tuple[str, int]] = deque()
        self._pause_s, self._again_s = _PAUSE_S, 0.0
        self._warnings = LogLimiter(_LOG)
        if 0 < len(options.salt) < LEAST_SALT:
            _LOG.warning("the salt of tier %s has %d characters: others may guess it", medium, len(options.salt))
        self._epoch_lock = Lock()
        super().__init__(
            host_blocks,
            medium,
            codec=codec,
            fingerprint=fingerprint,
            num_threads=options.num_threads,
            max_queued_blocks=max(1, options.max_queued_bytes // self.block_bytes),
            maintain_interval_s=maintain_interval_s,
            **{"query_deadline_s": options.timeout_s, "open_timeout_s": options.timeout_s} | properties,
        )

    # The five methods of a store. An OSError fails the batch, or is tried again. At the start, a PermissionError or
    # FileNotFoundError is a mistake of the configuration, so the engine does not start.

    @abstractmethod
    def read_epoch(self) -> str | None:
        """Return the value that is announced under `epoch_name`, or None."""

    @abstractmethod
    def announce_epoch(self, epoch: str, replace: bool) -> None:
        """Write an epoch under `epoch_name`. Without `replace`, write atomically and only if it is absent."""

    @abstractmethod
    def get_values(self, names: list[bytes], batch: TierBatch, received: Callable[[int, Seal | None], None]) -> None:
        """Read the payloads of `names` into the buffers of `batch`.

        Call ``received(i, seal)`` once the i-th buffer is filled, with the seal that was stored with it, or None if the
        value has another length. A name without a call counts as absent.
        """

    @abstractmethod
    def put_values(self, names: list[bytes], batch: TierBatch, seal: Callable[[int], bytes]) -> Sequence[int]:
        """Store the buffers of `batch` under `names`, each with ``seal(i)``; return a `BlockOutcome` per name.

        Existing names are HELD and not overwritten, except bad ones: see `is_bad`.
        """

    @abstractmethod
    def are_held(self, names: list[bytes]) -> Sequence[bool]:
        """Return per name whether the store has a value."""

    # Methods that a store may override.

    def connect(self) -> None:
        """Connect, if that is not done yet; called at the start and every `maintain_interval_s`."""

    def delete_values(self, names: list[bytes]) -> None:
        """Delete names that may exist. Without it, or if it raises, bad values stay until they are stored again."""

    def delete_older(self, prefix: bytes) -> bool | None:
        """Delete all names that begin with `prefix`. Without it, the store itself must evict blocks of old epochs.

        `maintain` calls it some time after a reset. Return False after a second or two to be called again. If it
        raises, it is called again, later after each failure.
        """

    # The rest is the same for every store.

    @classmethod
    def unavailable_reason(cls, options: Any) -> str:
        """Store, load and delete one block under a name of its own; return an error message, or ""."""
        tier: Any = None
        try:
            # A fingerprint that no engine has, so that the probe changes no engine's names.
            tier = cls.make(options, np.zeros((1, _PROBE_BYTES), np.uint8), {"check": secrets.token_hex(8)})
            reason: str = tier._probe()  # noqa: SLF001
            return reason
        except Exception as error:
            # The client of a store raises errors of its own package.
            return f"it cannot be used: {(str(error).splitlines() or [type(error).__name__])[0]}"
        finally:
            if tier is not None:
                tier.shutdown()

    def _probe(self) -> str:
        """Store, load and delete one block; return an error message. The tier joins no epoch afterwards."""
        batch = TierBatch(0, False, [b"check"], [0], None, None, self.generation, self.host_rows)
        self._join_epoch()
        names = [self.store_name(b"check"), self.epoch_name]
        try:
            if list(self.put(batch)) != [BlockOutcome.DONE]:
                return f"{self!r} refuses a block"
            if list(self.get(batch)) != [BlockOutcome.DONE]:
                return f"{self!r} does not return what was stored"
        finally:
            with self._epoch_lock:
                # The last call of `maintain` must not announce it again.
                self._announced = ""
            self.delete_values(names)
        return f"{self!r} does not delete names" if any(self.are_held(names)) else ""

    @property
    def epoch(self) -> str:
        """The epoch of this engine's blocks; empty until the store has answered."""
        return self._own or self._announced

    @property
    def epoch_name(self) -> bytes:
        """The name of the announced epoch of this engine's fingerprint."""
        if not self._start.weights:
            return self.prefix + b":epoch"
        return b"%b:%b:epoch" % (self.prefix, self._namespace.epoch_of(self._start).encode())

    @property
    def _sealed_weights(self) -> bytes:
        """The weights, if the announced epoch is another one: a seal covers them besides the name."""
        weights = self._own or self._namespace.epoch_of(self._start)
        return b"" if weights == self.epoch else weights.encode()

    def store_name(self, key: bytes) -> bytes:
        """Return the name of a block in the store."""
        return b"%b:%b:%b" % (self.prefix, self.epoch.encode("latin-1"), key)

    def open(self) -> None:
        # The engine also starts without a store; each later call tries again.
        try:
            self.connect()
            self._join_epoch()
        except (PermissionError, FileNotFoundError, ValueError) as error:
            self.close()
            raise ValueError(str(error)) from None
        except OSError:
            pass

    def exists(self, keys: list[bytes]) -> Sequence[bool]:
        try:
            self._join_epoch()
            return self.are_held([self.store_name(key) for key in keys])
        except Exception as error:
            self._warnings.warn("exists", "%r: look-ups fail: %s", self, error)
            raise

    def get(self, batch: TierBatch) -> Sequence[int]:
        self._join_epoch()
        names, buffers = [self.store_name(key) for key in batch.keys], batch.buffers
        weights, outcomes = self._sealed_weights, [BlockOutcome.ABSENT] * len(names)

        def received(i: int, seal: Seal | None) -> None:
            is_good = seal is not None and compare_digest(seal, self._namespace.seal(weights + names[i], buffers[i]))
            outcomes[i] = BlockOutcome.DONE if is_good else BlockOutcome.CORRUPT

        self.get_values(names, batch, received)
        bad = [name for name, outcome in zip(names, outcomes, strict=True) if outcome == BlockOutcome.CORRUPT]
        # A reset in between may have changed what a seal must cover.
        if bad and batch.generation == self.generation:
            self._try_to_delete(bad)
        return outcomes

    def put(self, batch: TierBatch) -> Sequence[int]:
        self._join_epoch()
        names, buffers = [self.store_name(key) for key in batch.keys], batch.buffers
        weights = self._sealed_weights
        refused = [BlockOutcome.REFUSED] * len(names)
        # Checked after the names are made: a reset raises the generation first, so no old block gets a new name.
        if batch.generation != self.generation:
            return refused
        outcomes = self.put_values(names, batch, lambda i: self._namespace.seal(weights + names[i], buffers[i]))
        if batch.generation != self.generation:
            # The reset may have deleted the old names before these were written. Names held before are others'.
            self._try_to_delete([name for name, out in zip(names, outcomes, strict=True) if out == BlockOutcome.DONE])
            return refused
        return outcomes

    def _try_to_delete(self, names: list[bytes]) -> None:
        """Try to delete names. A failure is noted, and does not affect the other blocks of the batch."""
        try:
            self.delete_values(names)
        except Exception as error:
            self._note_kept(error)

    def _note_kept(self, error: Exception) -> None:
        """Record that a deletion failed."""
        self._counts.note_error(f"delete: {error}")
        self._warnings.warn("delete", "%r does not delete blocks, which stay: %s", self, error)

    def stats(self) -> TierStats:
        return replace(super().stats(), undeleted_blocks=sum(num_blocks for _, num_blocks in tuple(self._left)))

    def clear(self, generation: int) -> None:
        """Begin the epoch of the reset without a call of the store. Later, `maintain` deletes an old private epoch."""
        num_stored = self._counts["stored_blocks"]
        if self._reset is not None and self._reset.kind is EpochKind.PRIVATE:
            self._left.append((self._own, num_stored - self._num_before))
        self._num_before, self._reset = num_stored, Epoch.after_reset(self.version)
        self._own = self._namespace.epoch_of(self._reset)

    def _delete_left(self) -> None:
        """Delete the blocks of the private epochs that this engine has left, for a bounded time."""
        end_s = time.monotonic() + _DELETE_S
        while self._left and self._again_s <= time.monotonic() < end_s:
            # The oldest first: a later reset does not replace the prefix of a deletion that goes on.
            try:
                if self.delete_older(b"%b:%b:" % (self.prefix, self._left[0][0].encode())) is False:
                    return
            except Exception as error:
                self._note_kept(error)
                # A failure to delete one epoch must not block the others.
                self._left.rotate(-1)
                self._again_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                return
            self._left.popleft()
            self._pause_s = _PAUSE_S

    def maintain(self) -> None:
        self.connect()
        with self._epoch_lock:
            # Reading keeps the epoch recent in a store that evicts any name.
            if self._announced and self.read_epoch() is None:
                self.announce_epoch(self._announced, replace=False)
        self._delete_left()

    def _join_epoch(self) -> None:
        """Take the announced epoch once, or announce that of the fingerprint if it is missing."""
        if self.epoch:
            return
        # One thread at a time, so that two do not join different epochs.
        with self._epoch_lock:
            if self.epoch:
                return
            if not (epoch := self.read_epoch()):
                self.announce_epoch(self._namespace.epoch_of(self._start), replace=False)
                epoch = self.read_epoch()
            if not epoch:
                raise OSError(f"{self!r} does not keep the epoch")
            self._announced = epoch
