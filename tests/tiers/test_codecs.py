"""Codecs of tiers: blocks that come back, refused blocks, counters, damage, and formats that must not change."""

import struct
import zlib

import numpy as np
import pytest
import torch
from stores import load_as_is, store_as_is

from kvcache import TierConfig, TieredOffloadingManager
from kvcache.assembly.assemble import parse_tier
from kvcache.metrics import samples_of
from kvcache.registry import CODECS
from kvcache.testing.tier_contract import TierContract
from kvcache.tiers.base.batch import BlockOutcome, TierBatch
from kvcache.tiers.base.checksum import checksum
from kvcache.tiers.base.codec import CannotEncodeError, Codec
from kvcache.tiers.base.codec_stage import CodecStage
from kvcache.tiers.base.tier import CodecTierStats
from kvcache.tiers.codecs.fp8 import Fp8Codec
from kvcache.tiers.codecs.zstd import ZstdCodec
from kvcache.tiers.memory import MemoryOptions, MemoryTier

KEYS = [b"codec-%02d" % number for number in range(40)]


class InvertingCodec(Codec):
    """As long as a block, and never the same bytes."""

    def __init__(self, block_bytes):
        self._block_bytes = block_bytes

    @property
    def max_bytes(self):
        return self._block_bytes

    @property
    def fingerprint(self):
        return {"codec": "inverting"}

    def encode(self, block, target):
        np.frombuffer(target, np.uint8)[:] = ~np.frombuffer(block, np.uint8)
        return len(block)

    decode = encode


INVERTING = {"type": InvertingCodec}


class TestContract(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return MemoryTier(MemoryOptions(**self.options(path, num_blocks)), host_blocks)

    def options(self, path, num_blocks):
        return {"capacity": 2 * num_blocks * self.block_bytes, "codec": INVERTING}


def compressible(num_blocks=40, block_bytes=1 << 14):
    blocks = np.random.default_rng(1).integers(0, 16, (num_blocks, block_bytes), np.uint8)
    return np.ascontiguousarray(blocks)


def open_configured(entry, host):
    settings = parse_tier(entry)
    tier = settings.make(host, {"model": "m"})
    assert isinstance(tier.stats(), CodecTierStats)
    return tier


def test_zstd_returns_same_bytes_in_fewer():
    host = compressible()
    before = host.copy()
    entry = {"type": "memory", "capacity": "1MiB", "codec": {"type": "zstd", "level": 3, "share": 0.7}}
    tier = open_configured(entry, host)
    manager = TieredOffloadingManager(16, 40, [(tier, TierConfig())])
    assert manager.prepare_store(KEYS).store_spec.block_ids.tolist() == list(range(40))
    manager.complete_store(KEYS)
    assert manager.settle()
    host[:] = 0
    assert load_as_is(tier, KEYS).done == KEYS
    assert (host == before).all()
    stats = tier.stats()
    assert (stats.codec, stats.encoded_blocks, stats.decoded_blocks) == ("zstd", 40, 40)
    assert stats.raw_bytes == host.nbytes
    # Four bits of eight carry something.
    assert 0.5 <= stats.code_bytes / stats.raw_bytes <= 0.6
    assert stats.encode_s > 0
    assert stats.decode_s > 0
    # 16 KiB blocks in rows of 12 KiB.
    assert tier.stats().num_blocks == (1 << 20) // (12 << 10)
    (part,) = manager.tier_parts()
    samples = {sample.name: sample.value for sample in samples_of(part)}
    names = ("encoded_blocks", "decoded_blocks", "unencodable_blocks", "raw_bytes", "code_bytes")
    assert [samples[f"tier_{name}"] for name in names] == [getattr(stats, name) for name in names]
    assert samples["tier_encode_seconds"] == stats.encode_s
    manager.shutdown()


def test_zstd_refuses_codes_of_others():
    block, target = compressible(1)[0], memoryview(bytearray(1 << 14))
    fast, small = (ZstdCodec(block.nbytes, level, 1.0).encode(block.data, target) for level in (1, 19))
    assert fast != small
    for code, message in ((target[:small], "another size than 8"), (target[1:], "no zstd frame")):
        with pytest.raises(ValueError, match=message):
            ZstdCodec(8).decode(code, memoryview(bytearray(8)))


@pytest.mark.parametrize("is_disk", [False, True])
def test_incompressible_block_is_refused_alone(tmp_path, is_disk):
    if is_disk:
        pytest.importorskip("xxhash")
    host = compressible(8)
    host[3] = np.random.default_rng(2).integers(0, 256, host.shape[1], np.uint8)
    before = host.copy()
    place = {"type": "disk", "path": str(tmp_path / "kv")} if is_disk else {"type": "memory"}
    entry = {**place, "capacity": "1MiB", "codec": {"type": "zstd"}}
    tier = open_configured(entry, host)
    result = store_as_is(tier, KEYS[:8])
    assert (result.done, result.failed, result.error) == (KEYS[:3] + KEYS[4:8], [KEYS[3]], "")
    assert (tier.stats().unencodable_blocks, tier.stats().refused_blocks) == (1, 1)
    assert tier.lookup(KEYS[:8]) == 3
    if is_disk:
        tier.shutdown()
        tier = open_configured(entry, host)
    host[:] = 0
    assert load_as_is(tier, KEYS[:8]).done == KEYS[:3] + KEYS[4:8]
    before[3] = 0
    assert (host == before).all()
    tier.shutdown()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fp8_is_off_by_a_sixteenth(dtype):
    kind = getattr(torch, dtype)
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).mul(3).to(kind)
    values[5] *= 1e-3
    values[6] = 0
    values[7, 0] = 10_000
    block = values.view(torch.uint8).numpy().reshape(-1)
    codec = Fp8Codec(block.size, dtype)
    code, back = bytearray(codec.max_bytes), np.empty_like(block)
    assert codec.encode(block.data, memoryview(code)) == codec.max_bytes == 64 * (128 + 4)
    codec.decode(memoryview(code), back.data)
    decoded = torch.from_numpy(back).view(kind).view(64, 128).float()
    largest = values.float().abs().amax(dim=1, keepdim=True)
    allowed = values.float().abs() / 16 * 1.01 + largest / 450_000
    assert ((decoded - values.float()).abs() <= allowed).all()
    assert (decoded[6] == 0).all()
    # The values differ, and the codec is marked as lossy.
    assert codec.is_lossy
    assert not torch.equal(decoded, values.float())
    for bad in (float("inf"), float("nan")):
        values[5, 1] = bad
        with pytest.raises(CannotEncodeError, match="infinite or no numbers"):
            codec.encode(block.data, memoryview(code))


def test_fp8_blocks_return_alike_every_time():
    host = torch.randn(40, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    host = host.view(torch.uint8).numpy().copy()
    before = host.copy()
    entry = {"type": "memory", "capacity": "1MiB", "codec": {"type": "fp8", "dtype": "bfloat16"}}
    tier = open_configured(entry, host)
    assert store_as_is(tier, KEYS).failed == []
    assert (host == before).all()
    loaded = []
    for job_id in (2, 3):
        host[:] = 0
        assert load_as_is(tier, KEYS, job_id).failed == []
        loaded.append(host.copy())
    assert (loaded[0] == loaded[1]).all()
    assert not (loaded[0] == before).all()
    assert tier.stats().raw_bytes / tier.stats().code_bytes == pytest.approx(2 * 128 / 132)
    tier.shutdown()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_codec_job_beyond_rows_is_whole(num_threads):
    host = np.concatenate([compressible(40)] * 5)
    keys = [b"codec-%03d" % number for number in range(200)]
    tier = MemoryTier(MemoryOptions(16 << 20, num_threads=num_threads, codec=INVERTING), host)
    assert len(tier.host_rows) == 32 * num_threads
    before = host.copy()
    assert sorted(store_as_is(tier, keys).done) == keys
    host[:] = 0
    assert sorted(load_as_is(tier, keys).done) == keys
    assert (host == before).all()
    tier.shutdown()


def test_raising_codec_fails_the_job_only():
    host = compressible(4)

    class RaisingCodec(InvertingCodec):
        is_raising = True

        def encode(self, block, target):
            if self.is_raising:
                raise RuntimeError("bug")
            return super().encode(block, target)

    tier = MemoryTier(MemoryOptions(1 << 20, num_threads=1, codec={"type": RaisingCodec}), host)
    for job_id in range(40):
        assert store_as_is(tier, KEYS[:2], job_id).error == "RuntimeError: bug"
    RaisingCodec.is_raising = False
    assert store_as_is(tier, KEYS[:2], 50).failed == []
    tier.shutdown()


def test_codec_row_keeps_its_old_format():
    host = np.arange(4096, dtype=np.uint16).view(np.uint8).reshape(1, 8192).copy()
    tier = MemoryTier(MemoryOptions(12288, codec=INVERTING), host)
    assert store_as_is(tier, [b"key"]).done == [b"key"]
    # A header of 32 bytes and the code, padded with zeros to a multiple of 4096.
    row = tier._blocks[0].tobytes()
    code_sum, block_sum = checksum(b"key", (~host[0]).data, 8192, 0), checksum(b"key", host[0].data, 8192, 0)
    assert row[:32] == struct.pack("<8sQQQ", b"kvcodec1", 8192, code_sum, block_sum)
    assert row[32:] == (~host[0]).tobytes() + bytes(4096 - 32)
    tier.shutdown()


def test_codecs_share_nothing():
    prints = [
        {"type": "fp8", "dtype": "bfloat16"},
        {"type": "fp8", "dtype": "float16"},
        {"type": "fp8", "dtype": "float16", "group": 64},
        {"type": "zstd", "level": 1},
        {"type": "zstd", "level": 1, "share": 0.5},
    ]
    made = [
        CODECS.resolve(one["type"]).from_config({k: v for k, v in one.items() if k != "type"}, 1 << 14)
        for one in prints
    ]
    assert len({str(codec.fingerprint) for codec in made}) == 5
    assert ZstdCodec(1 << 14, level=1).fingerprint == ZstdCodec(1 << 14, level=19).fingerprint


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("zstd", "codec in a memory tier must be a dict with a type, one of fp8, zstd, aes_gcm, got 'zstd'"),
        ({"type": "lz5"}, "unknown codec 'lz5', known ones: fp8, zstd, aes_gcm"),
        ({"type": "zstd", "level": 40}, "level of zstd must be in 1..22, got 40"),
        ({"type": "zstd", "levle": 1}, "unknown options of codec zstd: levle"),
        ({"type": "fp8"}, "codec fp8 needs 'dtype'"),
        ({"type": "fp8", "dtype": "int8"}, "dtype in codec fp8 must be one of bfloat16, .* got 'int8'"),
        (
            {"type": "fp8", "dtype": "bf16", "group": 1000},
            "whole groups of 1000 bf16 values, 2000 bytes, got 16384 bytes",
        ),
    ],
)
def test_bad_options_name_the_value(codec, message):
    with pytest.raises(ValueError, match=message):
        open_configured({"type": "memory", "capacity": "1MiB", "codec": codec}, compressible(4))


class PackingCodec(Codec):
    """Codes of many lengths; with `is_wrong` it decodes something else."""

    is_wrong = False
    max_bytes = 600
    fingerprint = {"codec": "packing"}  # noqa: RUF012

    def __init__(self):
        self.num_decoded = 0

    def encode(self, block, target):
        code = zlib.compress(block)
        if len(code) > len(target):
            raise CannotEncodeError
        target[: len(code)] = code
        return len(code)

    def decode(self, code, block):
        self.num_decoded += 1
        block[:] = bytes(len(block)) if self.is_wrong else zlib.decompress(code)


def test_codec_row_depends_on_block_alone():
    rng, codec = np.random.default_rng(3), PackingCodec()
    host = np.zeros((4, 512), np.uint8)
    for i, length in enumerate((500, 60, 300, 8)):
        host[i, :length] = rng.integers(1, 256, length, np.uint8)
    used = CodecStage(codec, host, 1, 1)
    rows = {}

    def batch_of(i, is_load):
        return TierBatch(1, is_load, [KEYS[i]], [i], None, None, 0, host)

    def keep(batch):
        rows[batch.keys[0]] = bytes(batch.buffers[0])

    for i in range(4):
        CodecStage(codec, host, 1, 1).put(batch_of(i, is_load=False), keep)
        expected = dict(rows)
        used.put(batch_of(i, is_load=False), keep)
        assert rows == expected
    before, codec.num_decoded = host.copy(), 0
    host[:] = 0

    def fetch(batch, damaged=()):
        row = bytearray(rows[batch.keys[0]])
        for at in damaged:
            row[at] ^= 0xFF
        batch.buffers[0][:] = row

    for at in (0, 8, 9, 15, 16, 24, 40):
        assert used.get(batch_of(0, is_load=True), lambda batch, at=at: fetch(batch, [at])) == [BlockOutcome.CORRUPT]
    codec.num_decoded = 0
    assert used.get(batch_of(0, is_load=True), lambda batch: [BlockOutcome.ABSENT]) == [BlockOutcome.ABSENT]
    assert codec.num_decoded == 0
    assert used.get(batch_of(2, is_load=True), fetch) == [BlockOutcome.DONE]
    assert (host[2] == before[2]).all()
    codec.is_wrong = True
    assert used.get(batch_of(0, is_load=True), fetch) == [BlockOutcome.CORRUPT]
