"""Codec aes_gcm: encrypts and authenticates the blocks of any tier. The configuration never contains the keys.

HKDF derives a key for each block from a master key and the block's name. Nonces are random, and each is used under one
such key only, so engines, restarts and copies of a machine need no common counter. A code is the id of the master
key, a nonce, the encrypted bytes and a tag. The tag covers the block's name, too, so a code that was moved to another
name is refused.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise ImportError("the aes_gcm codec needs a package: install kvcache's extra 'cryptography'") from error

from kvcache.options import Component, Options, hide_keys, option, read_small_file
from kvcache.tiers.base.codec import Codec, parse_codec

KEYS_VARIABLE = "KVCACHE_AES_KEYS"
_INFO = b"kvcache aes_gcm 1"
_KEY_BYTES = 32
_ID_BYTES = 16
_NONCE_BYTES = 12
_TAG_BYTES = 16
_MAX_FILE_BYTES = 1 << 16
_HEAD_BYTES = _ID_BYTES + _NONCE_BYTES
_LINE = re.compile(r"([A-Za-z0-9._-]{1,16})\s+([0-9a-fA-F]{64})")


def _parse_key_file(name: str, value: object) -> str:
    # The value may be a key by mistake, so the error does not show it.
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise ValueError(f"{name} must be the absolute path of a file")
    return value


@dataclass(frozen=True)
class AesGcmOptions(Options):
    """The options of an `AesGcmCodec`."""

    where: ClassVar[str] = "codec aes_gcm"

    key_file: str | None = option(
        _parse_key_file, None, when=f"the keys are in a file, not in the environment's `{KEYS_VARIABLE}`"
    )
    codec: Component | None = option(parse_codec, None, when="another codec must encode blocks first")


class AesGcmCodec(Codec):
    """Encrypt blocks with AES-256-GCM.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block.
    key_file : str, optional
        A file with a line ``ID KEY`` for each master key: up to 16 letters, digits, ``.``, ``_`` or ``-``, and 64
        hexadecimal digits. The first key encrypts, all of them decrypt. None: the environment's `KVCACHE_AES_KEYS`
        holds these lines, which commas may separate. Both are read once, here.
    codec : Component, optional
        Another codec, which encodes blocks before they are encrypted.

    Raises
    ------
    ValueError
        No key is given, or the keys cannot be read. No message shows a key.
    """

    options_type = AesGcmOptions
    is_authenticated = True

    def __init__(self, block_bytes: int, key_file: str | None = None, codec: Component | None = None) -> None:
        self._keys = _read_keys(key_file)
        self._key_id = next(iter(self._keys))
        self._inner: Codec | None = None if codec is None else codec.make(block_bytes)
        self.is_lossy = self._inner is not None and self._inner.is_lossy
        self._plain_bytes = block_bytes if self._inner is None else self._inner.max_bytes

    @classmethod
    def doubt(cls, options: AesGcmOptions) -> str:
        if options.key_file and (mode := Path(options.key_file).stat().st_mode & 0o777) & 0o024:
            return f"key_file {options.key_file} has the mode {mode:04o}: others may read the keys, or write to it"
        return "" if options.codec is None else options.codec.doubt()

    @property
    def max_bytes(self) -> int:
        return _HEAD_BYTES + self._plain_bytes + _TAG_BYTES

    @property
    def fingerprint(self) -> dict[str, Any]:
        # The key's id is left out, so that blocks outlive a rotation of keys.
        own = {"codec": "aes_gcm"}
        return own if self._inner is None else {**own, "inner": self._inner.fingerprint}

    def encode(self, block: memoryview, target: memoryview) -> int:
        return self.encode_named(b"", block, target)

    def decode(self, code: memoryview, block: memoryview) -> None:
        self.decode_named(b"", code, block)

    def encode_named(self, name: bytes, block: memoryview, target: memoryview) -> int:
        if self._inner is not None:
            encoded = memoryview(bytearray(self._plain_bytes))
            block = encoded[: self._inner.encode_named(name, block, encoded)]
        num_bytes = _HEAD_BYTES + len(block) + _TAG_BYTES
        nonce = os.urandom(_NONCE_BYTES)
        target[:_HEAD_BYTES] = self._key_id + nonce
        self._cipher(self._key_id, name).encrypt_into(nonce, block, name, target[_HEAD_BYTES:num_bytes])
        return num_bytes

    def decode_named(self, name: bytes, code: memoryview, block: memoryview) -> None:
        key_id, nonce = bytes(code[:_ID_BYTES]), bytes(code[_ID_BYTES:_HEAD_BYTES])
        num_bytes = len(code) - _HEAD_BYTES - _TAG_BYTES
        if key_id not in self._keys:
            raise ValueError(f"the block was encrypted with the unknown key {key_id!r}")
        if not 0 < num_bytes <= self._plain_bytes or (self._inner is None and num_bytes != len(block)):
            raise ValueError(f"a code of another length is expected, got {len(code)}")
        plain = block if self._inner is None else memoryview(bytearray(num_bytes))
        try:
            self._cipher(key_id, name).decrypt_into(nonce, code[_HEAD_BYTES:], name, plain)
        except InvalidTag:
            raise ValueError("the key, the name or the bytes are not those of the encryption") from None
        if self._inner is not None:
            self._inner.decode_named(name, plain, block)

    def _cipher(self, key_id: bytes, name: bytes) -> AESGCM:
        """Return the cipher of the block `name`."""
        return AESGCM(HKDF(SHA256(), _KEY_BYTES, salt=None, info=_INFO + name).derive(self._keys[key_id]))


def _read_keys(key_file: str | None) -> dict[bytes, bytes]:
    """Return the master keys by their ids, the one that encrypts first."""
    source = hide_keys(f"key_file {key_file}") if key_file else f"the environment's {KEYS_VARIABLE}"
    try:
        text = read_small_file(key_file, _MAX_FILE_BYTES).decode() if key_file else os.environ.get(KEYS_VARIABLE, "")
        if key_file and (mode := Path(key_file).stat().st_mode & 0o777) & 0o002:
            raise OSError(errno.EPERM, f"its mode is {mode:04o}, so all users may write to it")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{source} of codec aes_gcm cannot be read: {reason}") from None
    keys: dict[bytes, bytes] = {}
    lines = [line.strip() for line in re.split(r"[\n,]", text)]
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} of {source} must be 'ID KEY', where KEY is 64 hexadecimal digits")
        key_id = match[1].encode().ljust(_ID_BYTES, b"\0")
        if key_id in keys:
            raise ValueError(f"line {number} of {source} has the id of another line")
        keys[key_id] = bytes.fromhex(match[2])
    if not keys:
        raise ValueError(f"codec aes_gcm needs a master key: name a key_file, or set {KEYS_VARIABLE}; got none")
    return keys
