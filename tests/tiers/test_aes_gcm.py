"""The codec aes_gcm: content that it hides, codes that it refuses, and keys that are rotated, wrong or unreadable."""

import json
import multiprocessing
import os
import struct
import traceback

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from local_stores import LocalS3, LocalValkey
from stores import found, load, load_as_is, set_credentials, store, store_as_is

from kvcache.assembly.assemble import parse_tier
from kvcache.testing.tier_contract import TierContract
from kvcache.tiers.codecs.aes_gcm import KEYS_VARIABLE, AesGcmCodec
from kvcache.tiers.memory import MemoryOptions, MemoryTier
from kvcache.tiers.s3 import S3Options, _store_of

BLOCK_BYTES = 4096
KEYS = [bytes([number]) * 36 for number in range(1, 9)]
MASTER = b"a master key of 32 bytes, kept .."
OLD, NEW = f"old {MASTER[:32].hex()}", f"new-2026.1 {'0f' * 32}"
CODE_BYTES = 16 + 12 + BLOCK_BYTES + 16
ROW = struct.Struct("<8sQQQ")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, OLD)


class TestContract(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return MemoryTier(MemoryOptions(**self.options(path, num_blocks)), host_blocks)

    def options(self, path, num_blocks):
        return {"capacity": 2 * num_blocks * self.block_bytes, "codec": {"type": "aes_gcm"}}


def encode(codec, name, block):
    code = bytearray(codec.max_bytes)
    return code[: codec.encode_named(name, memoryview(block), memoryview(code))]


def test_code_matches_standard_algorithms():
    block = os.urandom(BLOCK_BYTES)
    code = bytes(encode(AesGcmCodec(BLOCK_BYTES), b"name", block))
    assert (code[:16], len(code)) == (b"old".ljust(16, b"\0"), CODE_BYTES)
    key = HKDF(SHA256(), 32, salt=None, info=b"kvcache aes_gcm 1name").derive(MASTER[:32])
    assert AESGCM(key).decrypt(code[16:28], code[28:], b"name") == block


def test_changed_code_is_refused():
    codec = AesGcmCodec(64)
    code, block = encode(codec, b"name", os.urandom(64)), memoryview(bytearray(64))
    codec.decode_named(b"name", memoryview(code), block)
    for at in range(len(code)):
        changed = bytearray(code)
        changed[at] ^= 1
        with pytest.raises(ValueError, match=r"unknown key" if at < 16 else r"are not those"):
            codec.decode_named(b"name", memoryview(changed), block)
    for length in (0, 1, 43, 44, len(code) - 1):
        with pytest.raises(ValueError, match=r"unknown key|another length"):
            codec.decode_named(b"name", memoryview(code)[:length], block)
    with pytest.raises(ValueError, match="are not those"):
        codec.decode_named(b"another name", memoryview(code), block)


def make_tier(place, fingerprint=None, **codec):
    """Return a configured tier with the codec."""
    entry = place | {"codec": {"type": "aes_gcm", **codec}}
    return parse_tier(entry).make(np.zeros((len(KEYS), BLOCK_BYTES), np.uint8), fingerprint or {"model": "m"})


@pytest.fixture(params=["disk", "valkey", "s3"])
def server(request, monkeypatch):
    """The server of a tier, None for a disk."""
    set_credentials(monkeypatch)
    server = {"disk": lambda: None, "valkey": LocalValkey, "s3": lambda: LocalS3("blocks")}[request.param]()
    yield server
    if server is not None:
        server.kill()


@pytest.fixture
def place(server, tmp_path):
    """An entry of `tiers`, without its codec."""
    if server is None:
        return {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}
    return {"type": "s3", **server.place} if isinstance(server, LocalS3) else {"type": "valkey", "url": server.url}


@pytest.fixture
def start(place, opened):
    """Start a tier; an earlier one on a disk ends."""

    def start_one(**options):
        for tier in opened if place["type"] == "disk" else ():
            tier.shutdown()
        opened.append(make_tier(place, **options))
        return opened[-1]

    return start_one


def test_undecodable_blocks_are_overwritten(start, place, server, monkeypatch):
    """A retired key, and one id with other bytes: blocks heal at the next start, and no name is ever deleted."""
    assert sorted(store(start(), KEYS).done) == KEYS
    for line in (NEW, f"new-2026.1 {'1f' * 32}"):
        monkeypatch.setenv(KEYS_VARIABLE, line)
        tier = start()
        assert (found(tier, KEYS), load(tier, KEYS).done) == (len(KEYS), [])
        assert (tier.stats().corrupt_blocks, tier.stats().loaded_blocks) == (len(KEYS), 0)
        result = store(tier, KEYS, 3)
        assert (sorted(result.done), result.failed) == (KEYS, [])
        assert (load(tier, KEYS, 4).done, load(start(), KEYS).done) == (KEYS, KEYS)
    # Blocks that it can decode are not sent again.
    if place["type"] != "disk":
        assert (store(tier, KEYS, 5).done, tier.stats().stored_blocks) == ([], len(KEYS))
        assert (server.calls["DELETE"], server.calls[b"UNLINK"]) == (0, 0)


def test_rotation_keeps_blocks(start, monkeypatch):
    store(start(), KEYS[:4])
    # The new key is known everywhere before any engine encrypts with it.
    for lines in (f"{OLD}\n{NEW}\n", f"{NEW}, {OLD}"):
        monkeypatch.setenv(KEYS_VARIABLE, lines)
        tier = start()
        assert load(tier, KEYS[:4]).done == KEYS[:4]
    store(tier, KEYS[4:])
    monkeypatch.setenv(KEYS_VARIABLE, NEW)
    assert load(start(), KEYS).done == KEYS[4:]


@pytest.mark.parametrize("inner", [{"type": "zstd", "share": 1.0}, {"type": "fp8", "dtype": "bfloat16"}])
def test_inner_codec_is_encrypted(start, inner):
    tier = start(codec=inner)
    tier._pool[:] = np.arange(BLOCK_BYTES, dtype=np.uint8) // 16
    expected = tier._pool.copy()
    assert sorted(store_as_is(tier, KEYS).done) == KEYS
    tier._pool[:] = 0
    assert load_as_is(tier, KEYS).done == KEYS
    if inner["type"] == "zstd":
        assert (tier._pool == expected).all()
        assert tier.stats().code_bytes < tier.stats().raw_bytes / 2


def test_stored_row_tells_nothing_of_block():
    """It has no checksum either: that would confirm a guessed block."""
    host = np.full((2, BLOCK_BYTES), 7, np.uint8)
    tier = MemoryTier(MemoryOptions(4 * BLOCK_BYTES, codec={"type": "aes_gcm"}), host)
    store_as_is(tier, KEYS[:2])
    rows = [row.tobytes() for row in tier._blocks]
    assert [ROW.unpack_from(row) for row in rows] == [(b"kvcodec1", CODE_BYTES, 0, 0)] * 2
    # Equal blocks, and one key of the environment: but for its id, no 8 bytes are equal.
    parts = [{row[at : at + 8] for at in range(48, 32 + CODE_BYTES - 8)} for row in rows]
    assert not parts[0] & parts[1]
    assert len(parts[0]) == CODE_BYTES - 8 - 16
    tier.shutdown()


def test_moved_or_changed_value_is_refused(opened):
    """Who may write to the store makes valid seals without a salt, and cannot make a code."""
    server = LocalValkey()
    tier, other = tiers = [make_tier({"type": "valkey", "url": server.url}, {"model": name}) for name in ("m", "other")]
    opened += tiers
    for each in tiers:
        store(each, KEYS[:4])
    rows = {key: server.values[tier.store_name(key)][16:] for key in KEYS[:4]}
    moved = {
        KEYS[0]: rows[KEYS[1]],
        KEYS[1]: server.values[other.store_name(KEYS[1])][16:],
        KEYS[2]: rows[KEYS[2]][:100] + bytes([rows[KEYS[2]][100] ^ 1]) + rows[KEYS[2]][101:],
        KEYS[3]: rows[KEYS[3]],
    }
    for key, row in moved.items():
        name = tier.store_name(key)
        server.values[name] = tier._namespace.seal(name, row) + row
    assert load(tier, KEYS[:4]).done == [KEYS[3]]
    assert tier.stats().corrupt_blocks == 3
    server.kill()


def _nonces(num_blocks, pipe=None):
    codec, block, code = AesGcmCodec(16), memoryview(bytes(16)), memoryview(bytearray(64))
    nonces = set()
    for _ in range(num_blocks):
        codec.encode_named(b"one block", block, code)
        nonces.add(bytes(code[16:28]))
    if pipe is not None:
        pipe.send(nonces)
    return nonces


@pytest.mark.parametrize("num_blocks", [2000, pytest.param(250_000, marks=pytest.mark.slow)])
def test_forked_processes_share_no_nonce(num_blocks):
    context = multiprocessing.get_context("fork")
    before = _nonces(num_blocks)
    pipes = []
    for _ in range(2):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_nonces, args=(num_blocks, theirs))
        process.start()
        pipes.append((ours, process))
    everything = [before, _nonces(num_blocks), *(pipe.recv() for pipe, _ in pipes)]
    for _, process in pipes:
        process.join()
    assert len(set().union(*everything)) == 4 * num_blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a master key: name a key_file, or set KVCACHE_AES_KEYS; got none"),
        (" ,\n", "got none"),
        ("ab" * 32, "line 1 of the environment's KVCACHE_AES_KEYS must be 'ID KEY'"),
        (f"{OLD}\nnew {'ab' * 31}", "line 2 of .* must be 'ID KEY', where KEY is 64 hexadecimal digits"),
        (f"an-id-of-17-bytes {'ab' * 32}", "line 1 of"),
        (f"{OLD},{OLD}", "line 2 of .* has the id of another line"),
    ],
)
def test_bad_keys_are_named_unseen(monkeypatch, text, message):
    monkeypatch.setenv(KEYS_VARIABLE, text)
    with pytest.raises(ValueError, match=message) as caught:
        AesGcmCodec(16)
    assert "abab" not in str(caught.value)
    assert MASTER[:8].hex() not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"\xff\xfe", "cannot be read: it is not text"), (b"\n", "got none")],
)
def test_bad_key_file_names_itself(tmp_path, content, message):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        AesGcmCodec(16, str(path))
    path.write_text(f"{NEW}\r\n{OLD}\r\n")
    assert bytes(encode(AesGcmCodec(16, str(path)), b"", bytes(16)))[:16] == b"new-2026.1".ljust(16, b"\0")


def test_unusual_key_files_are_refused(tmp_path):
    path, named = tmp_path / "keys", tmp_path / "another"
    path.write_text(NEW)
    path.chmod(0o666)
    os.mkfifo(named)
    (tmp_path / "long").write_text(f"{NEW}\n" * 4000)
    for file, message in (
        (path, "its mode is 0666, so all users may write to it"),
        (named, "it is not a regular file"),
        ("/dev/zero", "it is not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "long", "it is longer than 65536 bytes"),
        (f"/{'ab' * 32}", r"key_file /\*\*\* of codec aes_gcm cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            AesGcmCodec(16, str(file))
    for file in (named, "/dev/zero"):
        with pytest.raises(ValueError, match="it is not a regular file"):
            _store_of(S3Options(bucket="blocks", ca_file=str(file)))
    for mode, doubt in ((0o600, ""), (0o640, ""), (0o644, "mode 0644: others"), (0o660, "mode 0660: others")):
        path.chmod(mode)
        codec = parse_tier({"type": "memory", "capacity": "1MiB", "codec": {"type": "aes_gcm", "key_file": str(path)}})
        found_doubt = codec.options.codec.doubt()
        assert doubt in found_doubt if doubt else found_doubt == ""


HEX = "0f1e2d3c4b5a6978" * 4
MISPLACED = [
    *({"key_file": value} for value in ("KEY", "/KEY", "/tmp/KEY", "old KEY", ["KEY"], {"a": "KEY"}, "\udcffKEY")),
    *({"key": "KEY"}, {"KEY": 1}, {"codec": "KEY"}, {"codec": {"type": "KEY"}}, {"codec": {"KEY": 1}}, {"type": "KEY"}),
    *({"codec": {"type": "zstd", "level": "KEY"}}, {"codec": {"type": "zstd", "KEY": 1}}, {"type": "m.n:KEY"}),
]


@pytest.mark.parametrize("key", [HEX, HEX[:32], f"old {HEX}", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="])
def test_misplaced_key_is_never_shown(monkeypatch, key):
    tier = {"type": "memory", "capacity": "1MiB"}
    entries = [tier | {"codec": {"type": "aes_gcm"} | codec} for codec in MISPLACED]
    entries += [tier | {"codec": value} for value in ("KEY", ["KEY"], {"key": "KEY"})]
    entries += [tier | part for part in ({"KEY": 1}, {"capacity": "KEY"}, {"type": "KEY"}, {"type": "KEY:KEY"})]
    entries += [{"codec": {"type": "aes_gcm"}, "key_file": "KEY"}]
    for entry in entries:
        with pytest.raises(ValueError, match=r"codec|key_file|type|unknown|capacity|tier") as caught:
            parse_tier(json.loads(json.dumps(entry).replace("KEY", key)))
        assert key.split()[-1] not in "".join(traceback.format_exception(caught.value))
    key = key.split()[-1]
    for text in (key, f"{key} id", f"{HEX[:16]} {HEX},{HEX[:16]} {HEX}", f"id {key} x", f"id:{key}"):
        monkeypatch.setenv(KEYS_VARIABLE, text)
        with pytest.raises(ValueError, match=r"line \d of the environment's") as caught:
            AesGcmCodec(16)
        assert HEX[:16] not in str(caught.value)
        assert key not in str(caught.value)
