"""Digests of weight files: whole contents, read once, and never vouched for by a stale or foreign cache."""

import json
import mmap
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvcache.integrations.vllm import weights
from kvcache.integrations.vllm.weights import cache_path, digest_of_files

# More than two leaves, and no whole number of them.
NUM_BYTES = 2 * weights._LEAF_BYTES + 4321


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path):
    """Two files that were written a minute ago."""
    folder = tmp_path / "model"
    folder.mkdir()
    files = [folder / f"model-{i}.safetensors" for i in range(2)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * NUM_BYTES)
    return files


@pytest.fixture
def later(monkeypatch):
    """The clock a minute later, so that the files are no longer recent."""
    now_s = weights.time.time()
    monkeypatch.setattr(weights.time, "time", lambda: now_s + 60)


def digest(files):
    """Return the digest and the bytes that were read for it."""
    num_read = []
    return digest_of_files(files, num_read.append), sum(num_read)


def edit(file, offset, data=b"x"):
    """Write over a few bytes in place, and restore the modification time."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_digest_second_start_reads_nothing(files, later):
    first = digest(files)
    assert first[1] == 2 * NUM_BYTES
    assert digest(files) == (first[0], 0)
    assert cache_path().stat().st_mode & 0o077 == 0
    assert [path.name for path in cache_path().parent.iterdir()] == ["weights.json"]


@pytest.mark.parametrize("offset", [0, weights._LEAF_BYTES - 1, weights._LEAF_BYTES, NUM_BYTES - 1])
def test_digest_byte_edited_in_place_differs(files, later, offset):
    before = digest(files)[0]
    edit(files[1], offset)
    changed, num_read = digest(files)
    assert changed != before
    assert num_read == NUM_BYTES
    edit(files[1], offset, b"\1")
    assert digest(files)[0] == before


def test_digest_replaced_file_is_read(files, later, monkeypatch):
    def without_ctime(status):
        # Some file systems keep no times of changes.
        return [status.st_size, status.st_mtime_ns, 1, status.st_ino]

    monkeypatch.setattr(weights, "_look_of", without_ctime)
    before = digest(files)[0]
    other = files[0].with_name("other")
    shutil.copy2(files[0], other)
    edit(other, 0)
    times = files[0].stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(files[0])
    assert digest(files) == (digest(files)[0], NUM_BYTES)
    assert digest(files)[0] != before


def test_digest_recent_change_is_not_kept(files):
    for file in files:
        # The time of modification can be set back, that of the change cannot.
        os.utime(file, (1, 1))
    assert [digest(files)[1] for _ in range(2)] == [2 * NUM_BYTES] * 2
    assert not cache_path().exists()


def test_digest_copy_elsewhere_is_equal(files, later, tmp_path, monkeypatch):
    before, pread = digest(files)[0], os.pread
    # A network file system may return less than was asked for.
    monkeypatch.setattr(os, "pread", lambda fd, num_bytes, offset: pread(fd, min(num_bytes, 1 << 20), offset))
    copy = shutil.copytree(files[0].parent, tmp_path / "copy")
    assert digest(sorted(copy.iterdir()))[0] == before
    links = [tmp_path / f"link-{i}" for i in range(2)]
    for link, file in zip(links, files, strict=True):
        link.symlink_to(file)
    assert digest(links) == (before, 0)
    assert digest(files[::-1])[0] != before


def test_file_written_meanwhile_is_not_cached(files, later, monkeypatch):
    pread, num_calls = os.pread, []

    def write_and_read(*args):
        if not num_calls:
            files[0].write_bytes(b"z" * NUM_BYTES)
        num_calls.append(1)
        return pread(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", write_and_read)
        digest(files)
    assert digest(files)[1] == NUM_BYTES


def spoil_json(path):
    path.write_text("[" * 100_000)


def spoil_entries(path):
    path.write_text(json.dumps({name: [*entry[:4], "sha"] for name, entry in json.loads(path.read_text()).items()}))


def replace_by_link(path):
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    "spoil",
    [spoil_json, spoil_entries, replace_by_link, lambda path: path.chmod(0o666), lambda path: path.write_text("[]")],
    ids=["not JSON", "no digest", "a link", "open to others", "a list"],
)
def test_digest_spoiled_cache_reads_again(files, later, spoil):
    before = digest(files)[0]
    spoil(cache_path())
    assert digest(files) == (before, 2 * NUM_BYTES)
    # The next write replaces what was spoiled.
    assert digest(files) == (before, 0)


def test_digest_without_cache_reads_again(files, later, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    assert [digest(files)[1] for _ in range(2)] == [2 * NUM_BYTES] * 2
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError))
    assert [digest(files)[1] for _ in range(2)] == [2 * NUM_BYTES] * 2
    assert list(cache_path().parent.iterdir()) == []


def test_cache_path_without_home_is_absolute(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_path() == Path.home() / ".cache" / "kvcache" / "weights.json"
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    assert cache_path().is_absolute()


def test_full_cache_keeps_newest_files(files, later, monkeypatch):
    monkeypatch.setattr(weights, "_MAX_FILES", 1)
    digest(files)
    assert list(json.loads(cache_path().read_text())) == [str(files[1])]
    assert digest(files)[1] == NUM_BYTES


def test_digest_unreadable_file_raises(files):
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        digest(files)


def test_file_in_memory_is_always_read(files, later, monkeypatch):
    """A mapping of tmpfs changes no time of the file, however long ago its first write was."""
    folder = Path("/dev/shm", f"kvcache-test-{os.getpid()}")
    folder.mkdir()
    try:
        copy = Path(shutil.copy(files[0], folder))
        first = digest([copy, files[1]])
        assert digest([copy, files[1]]) == (first[0], NUM_BYTES)
        with copy.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            mapping[5] = 1
            digests, looks = [], []
            for value in (2, 3):
                mapping[5] = value
                mapping.flush()
                looks.append(weights._look_of(copy.stat()))
                digests.append(digest([copy]))
        assert looks[0] == looks[1], "or this test proves nothing"
        assert digests[0][0] != digests[1][0]
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(("age_s", "num_read"), [(59, 2 * NUM_BYTES), (61, 0)])
def test_young_file_is_read_again(files, monkeypatch, age_s, num_read):
    youngest_s = max(file.stat().st_ctime for file in files)
    monkeypatch.setattr(weights.time, "time", lambda: youngest_s + age_s)
    digest(files)
    assert digest(files)[1] == num_read
