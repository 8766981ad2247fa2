"""Only the same user can open memory that processes share, and no file stays after the last process has closed it."""

import fcntl
import gc
import mmap
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvcache.transfer import shared_file
from kvcache.transfer.shared_file import PREFIX, FileRecord, SharedBlocks, leftover_files, private_folder


def blocks_at(path, is_owner=True):
    return SharedBlocks(path, 4, 4096, is_owner)


def lock_whole(fd, kind):
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


@pytest.fixture(autouse=True)
def _closed_files(open_files):
    """Each test closes its files, and refusals close theirs."""
    yield
    assert open_files() == []


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"{PREFIX}a"


def test_owner_and_others_share_bytes(path):
    owner, other = blocks_at(path), blocks_at(path, is_owner=False)
    owner.array[2, 17] = 5
    assert other.array[2, 17] == 5
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert owner.has_owner()
    assert other.has_owner()
    # `has_owner` did not release the owner's lock.
    with pytest.raises(ValueError, match="belongs to another engine; give this one a pool_path of its own"):
        blocks_at(path)
    owner.close()
    owner.close()
    assert not path.exists()
    assert not other.has_owner()
    other.close()


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_blocks_start_at_huge_page(path, has_huge_pages, monkeypatch):
    if not has_huge_pages:
        monkeypatch.setattr(shared_file._LIBC, "madvise", lambda *_: -1)
    blocks = SharedBlocks(path, 3, 1 << 20, is_owner=True)
    array = blocks.array
    assert path.stat().st_blocks * 512 >= array.nbytes
    assert array.ctypes.data % (2 << 20) == 0
    assert not array.any()
    array[:] = 7
    blocks.close()
    del blocks
    gc.collect()
    assert (array == 7).all()


def make_file(path, mode):
    path.touch()
    path.chmod(mode)


REGULAR = "must be a regular file with one name"
REFUSED = {
    "symbolic link": (lambda path, victim: path.symlink_to(victim), "cannot be opened: it is a symbolic link"),
    "dangling link": (lambda path, _: path.symlink_to(path.parent / "none"), "it is a symbolic link"),
    "hard link": (lambda path, victim: path.hardlink_to(victim), REGULAR),
    "fifo": (lambda path, _: os.mkfifo(path, 0o600), REGULAR),
    "0o644": (lambda path, _: make_file(path, 0o644), "is open to other users: its mode is 644"),
    "0o660": (lambda path, _: make_file(path, 0o660), "is open to other users: its mode is 660"),
    "0o606": (lambda path, _: make_file(path, 0o606), "is open to other users: its mode is 606"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_file_of_wrong_kind_is_left(path, tmp_path, kind):
    make, message = REFUSED[kind]
    victim = tmp_path / "victim"
    make_file(victim, 0o600)
    make(path, victim)
    before = path.lstat()
    with pytest.raises(ValueError, match=f"{path} .*{message}"):
        blocks_at(path)
    assert (os.path.samestat(before, path.lstat()), path.lstat().st_size) == (True, before.st_size)
    assert victim.stat().st_size == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_refused(path):
    path.touch(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match=f"{path} belongs to user 12345, not to 0"):
        blocks_at(path)


@pytest.mark.parametrize("is_owner", [True, False])
def test_foreign_lock_is_awaited_within_bounds(path, is_owner, monkeypatch):
    monkeypatch.setattr(shared_file, "_LOCK_TIMEOUT_S", 0.1)
    path.touch(0o600)
    fd = os.open(path, os.O_RDWR)
    lock_whole(fd, fcntl.F_WRLCK)
    # This timer ends an unbounded wait, which was a bug.
    release = threading.Timer(20, lock_whole, (fd, fcntl.F_UNLCK))
    release.start()
    try:
        with pytest.raises(ValueError, match=f"{path} is locked by another process"):
            blocks_at(path, is_owner)
    finally:
        release.cancel()
        os.close(fd)


def test_owner_is_accepted_beside_worker(path, monkeypatch):
    monkeypatch.setattr(shared_file, "_OWNER_TIMEOUT_S", 60)
    worker = blocks_at(path, is_owner=False)
    assert not worker.has_owner()
    # The lock that `has_owner` takes, held for longer.
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    answered = threading.Timer(0.1, fcntl.flock, (fd, fcntl.LOCK_UN))
    answered.start()
    blocks_at(path).close()
    answered.join()
    os.close(fd)
    worker.close()


def test_file_replacing_orphan_is_not_removed(path, tmp_path, monkeypatch):
    orphan = tmp_path / f"{PREFIX}orphan"
    orphan.touch(0o600)
    found = []

    def replace_and_lock(fd, kind):
        # Between opening and locking, another process removes the orphan and creates a file of the same name.
        if kind == fcntl.F_WRLCK and not found:
            orphan.unlink()
            found.append(blocks_at(orphan, is_owner=False))
        return lock_as_before(fd, kind)

    lock_as_before = shared_file._lock_whole
    monkeypatch.setattr(shared_file, "_lock_whole", replace_and_lock)
    blocks_at(path).close()
    assert orphan.exists()
    found[0].close()


def test_only_unlocked_pool_files_are_removed(path, tmp_path):
    names = ("held", "orphan", "link", "fifo", "folder")
    held, orphan, link, fifo, folder = (tmp_path / f"{PREFIX}{name}" for name in names)
    holder = blocks_at(held, is_owner=False)
    orphan.touch(0o600)
    link.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(fifo)
    folder.mkdir()
    blocks_at(path).close()
    assert sorted(tmp_path.iterdir()) == sorted([held, link, fifo, folder])
    holder.close()


def test_owner_removes_its_own_file_only(path):
    first = blocks_at(path)
    path.unlink()
    second = blocks_at(path)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_unlinked_file_is_not_opened_again(path):
    first = blocks_at(path)
    first.unlink()
    second = blocks_at(path)
    second.array[0, 0] = 1
    assert first.array[0, 0] == 0
    first.close()
    assert path.exists()
    second.close()


@pytest.mark.parametrize("ended_by", ["kill", "exit"])
def test_forked_child_loses_the_ownership(path, ended_by):
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from kvcache.transfer.shared_file import SharedBlocks\n"
        "blocks = SharedBlocks(Path(sys.argv[1]), 4, 4096, True)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.close(1)\n"
        "    time.sleep(60)\n"
        "print(child, flush=True)\n"
        "if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(path), ended_by]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=ended_by == "exit", timeout=60)
    try:
        assert path.exists() == (ended_by == "kill")
        other = blocks_at(path, is_owner=False)
        assert not other.has_owner()
        blocks_at(path).close()
        other.close()
    finally:
        os.kill(int(ended.stdout), signal.SIGKILL)


def test_private_folder_is_for_this_user(tmp_path):
    folder = private_folder(tmp_path)
    assert folder == tmp_path / f"kvcache-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(tmp_path) == folder
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="is open to other users: its mode is 755"):
        private_folder(tmp_path)
    folder.rename(tmp_path / "target").chmod(0o700)
    folder.symlink_to(tmp_path / "target")
    with pytest.raises(ValueError, match="must be a folder"):
        private_folder(tmp_path)


def test_pool_in_world_writable_folder_raises(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="any user may rename files in it"):
        blocks_at(folder / "pool")
    folder.chmod(0o1777)
    blocks_at(folder / "pool").close()
    with pytest.raises(ValueError, match=f"shared pools cannot be made in {tmp_path}/none: No such file"):
        blocks_at(tmp_path / "none" / "pool")


def test_file_too_large_is_removed(tmp_path, monkeypatch):
    # Free memory may be taken between the check and the allocation.
    monkeypatch.setattr(shared_file, "check_memory", lambda *_: None)
    path = Path(f"/dev/shm/kvcache-test-{os.getpid()}-{tmp_path.name}")
    with pytest.raises(ValueError, match=r"No space left on device|File too large|Cannot allocate memory"):
        SharedBlocks(path, 1 << 30, 4096, True)
    assert not path.exists()


def test_child_close_keeps_parents_file(path, monkeypatch):
    blocks, parent = blocks_at(path), os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        blocks.unlink()
        assert path.exists()
    other = blocks_at(path, is_owner=False)
    assert other.array.shape == (4, 4096)
    other.close()
    blocks.close()


# An engine: it records the file of another library, makes it, maps it, and waits.
ENGINE = """
import mmap, os, sys, time
from pathlib import Path
from kvcache.transfer.shared_file import FileRecord
path = Path(sys.argv[1])
record = FileRecord(path)
fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 8192)
if sys.argv[2] == "maps":
    mapping = mmap.mmap(fd, 8192)
    os.close(fd)
print("ready", flush=True)
time.sleep(60)
"""


def start_engine(path, how="maps"):
    command = [sys.executable, "-W", "ignore", "-c", ENGINE, str(path), how]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert engine.stdout.readline() == b"ready\n"
    return engine


def kill(engine):
    engine.kill()
    engine.wait()
    engine.stdout.close()


@pytest.fixture
def region(tmp_path):
    return tmp_path / "vllm_offload_a b.mmap"


def test_leftover_of_killed_engine_is_removed(region, tmp_path):
    workers = [start_engine(region), start_engine(region)]
    for worker in workers:
        assert leftover_files(tmp_path, remove=True) == []
        assert region.exists()
        kill(worker)
    assert leftover_files(tmp_path) == [(region, 8192)]
    assert region.exists()
    assert leftover_files(tmp_path, remove=True) == [(region, 8192)]
    assert not region.exists()
    assert list(private_folder(tmp_path).iterdir()) == []


@pytest.mark.parametrize("how", ["maps", "opens"])
def test_used_leftover_without_record_stays(region, tmp_path, how):
    kill(start_engine(region))
    # A process that starts and did not record the file, as vLLM's own.
    with region.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 8192)
        if how == "opens":
            mapping.close()
        else:
            file.close()
        assert leftover_files(tmp_path, remove=True) == []
        mapping.close()
    assert leftover_files(tmp_path, remove=True) == [(region, 8192)]


@pytest.mark.parametrize("kind", ["no record", "directory", "symbolic link", "hard link", "open folder"])
def test_foreign_leftover_stays(region, tmp_path, kind):
    folder = private_folder(tmp_path)
    if kind != "no record":
        (folder / f"record-{region.name}").touch(0o600)
    if kind == "directory":
        region.mkdir()
    elif kind == "symbolic link":
        region.symlink_to(folder)
    else:
        region.write_bytes(b"other")
        if kind == "hard link":
            (tmp_path / "other").hardlink_to(region)
        elif kind == "open folder":
            folder.chmod(0o770)
    assert leftover_files(tmp_path, remove=True) == []
    assert region.exists()


def test_leftover_files_creates_nothing(region, tmp_path):
    assert leftover_files(tmp_path / "none", remove=True) == []
    assert leftover_files(tmp_path, remove=True) == []
    assert list(tmp_path.iterdir()) == []
    (private_folder(tmp_path) / f"record-{region.name}").touch(0o600)
    region.write_bytes(b"left")
    assert leftover_files(tmp_path, remove=True) == [(region, 4)]
    assert list(tmp_path.rglob("*")) == [private_folder(tmp_path)]


def test_record_ends_with_its_file(region, tmp_path):
    record, other = FileRecord(region), FileRecord(region)
    region.touch(0o600)
    record.close()
    region.unlink()
    assert len(list(private_folder(tmp_path).iterdir())) == 1
    other.close()
    assert list(private_folder(tmp_path).iterdir()) == []
    record = FileRecord(region)
    region.touch(0o600)
    record.close()
    assert len(list(private_folder(tmp_path).iterdir())) == 1, "a file that stays keeps its record"
