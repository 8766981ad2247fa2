"""The codecs pass the contract of all codecs, and faulty ones fail it."""

import numpy as np
import pytest

from kvcache.testing.codec_contract import CodecContract
from kvcache.tiers.base.codec import Codec


class Plain(Codec):
    def __init__(self, block_bytes):
        self._block_bytes = block_bytes

    @property
    def max_bytes(self):
        return self._block_bytes

    @property
    def fingerprint(self):
        return {"codec": "plain"}

    def encode(self, block, target):
        target[: len(block)] = block
        return len(block)

    def decode(self, code, block):
        if len(code) != len(block):
            raise ValueError("another length")
        block[:] = code


class Flips(Plain):
    def decode(self, code, block):
        super().decode(code, block)
        block[0] ^= 1


class Overruns(Plain):
    def encode(self, block, target):
        return super().encode(block, target) + 1


class Shares(Plain):
    """Keeps the last code in the codec, which threads share."""

    fingerprint = property(lambda self: {"codec": object()})


class TestPlain(CodecContract):
    def make_codec(self, block_bytes):
        return Plain(block_bytes)


class TestZstd(CodecContract):
    def make_codec(self, block_bytes):
        return pytest.importorskip("kvcache.tiers.codecs.zstd").ZstdCodec(block_bytes)


class TestFp8(CodecContract):
    def blocks(self):
        draw = np.random.default_rng(1).normal(size=(4, self.block_bytes // 4)).astype(np.float32)
        return [block.tobytes() for block in draw]

    def make_codec(self, block_bytes):
        return pytest.importorskip("kvcache.tiers.codecs.fp8").Fp8Codec(block_bytes, "float32")


class TestAesGcm(CodecContract):
    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_AES_KEYS", f"a {'01' * 32}")

    def make_codec(self, block_bytes):
        return pytest.importorskip("kvcache.tiers.codecs.aes_gcm").AesGcmCodec(block_bytes)


@pytest.mark.parametrize(
    ("faulty", "test", "message"),
    [
        (Flips, "test_blocks_return", "changed a block"),
        (Overruns, "test_blocks_return", "of max_bytes"),
        (Shares, "test_fingerprint_names_codec", "not JSON serializable"),
    ],
)
def test_faulty_codec_fails_contract(faulty, test, message):
    contract = type("Contract", (CodecContract,), {"make_codec": lambda self, block_bytes: faulty(block_bytes)})()
    with pytest.raises((AssertionError, TypeError), match=message):
        getattr(contract, test)()
