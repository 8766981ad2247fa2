"""The free memory of the machine, and errors for pools that exceed it."""

import pytest

from kvcache.transfer import free_memory as memory
from kvcache.transfer.host_pool import HostPool

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")


def write_cgroup(root, line, directory, names, *values):
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(line)
    path = root / "sys/fs/cgroup" / directory
    path.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, values, strict=True):
        (path / name).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("line", "directory", "names", "values", "left"),
    [
        ("0::/a/b\n", "a/b", V2, ("1000", "600", "inactive_file 100\nactive_file 50"), 550),
        # A container may see its own group at the root.
        ("3:memory:/docker/abc\n", "memory", V1, ("1000", "300", ""), 700),
        (
            "4:cpu:/x\n3:memory:/box\n0::/\n",
            "memory/box",
            V1,
            ("1000", "300", "total_inactive_file 50\ntotal_active_file 0"),
            750,
        ),
        ("0::/a\n", "a", V2, ("max", "600", ""), None),
        ("no cgroup\n0::/a\n", "a", V2, ("a lot", "600", ""), None),
        ("no cgroup\n0::/a\n", "a", V2, ("1000", "", ""), None),
        ("no cgroup\n0::/a\n", "a", V2, ("1000", "600", "inactive_file"), None),
        ("no cgroup\n0::/a\n", "a", V2, ("1000", "600", "inactive_file many"), None),
    ],
    ids=["v2", "v1-at-the-root", "v1", "unlimited", "bad-limit", "no-usage", "odd-statistics", "bad-statistics"],
)
def test_cgroup_memory_ignores_page_cache(tmp_path, line, directory, names, values, left):
    write_cgroup(tmp_path, line, directory, names, *values)
    source = f"{tmp_path}/sys/fs/cgroup/{directory}/{names[0]} = {values[0]}"
    assert memory._cgroup_memory(tmp_path) == (None if left is None else (left, source))
    assert memory._cgroup_memory(tmp_path / "nowhere") is None


def test_cgroup_memory_is_smaller_of_levels(tmp_path):
    write_cgroup(tmp_path, "0::/a/b\n", "a/b", V2, "1000", "600", "inactive_file 0")
    write_cgroup(tmp_path, "0::/a/b\n", "a", V2, "900", "800", "")
    assert memory._cgroup_memory(tmp_path)[0] == 100


@pytest.mark.parametrize("text", ["MemAvailable:\n", "MemAvailable: much kB\n", "MemFree: 5 kB\n", ""])
def test_machine_memory_unreadable_meminfo_returns_none(tmp_path, text):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    assert memory._machine_memory(tmp_path) is None
    assert memory._machine_memory(tmp_path / "nowhere") is None


def test_memory_beyond_limit_is_zero(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_memory", lambda root: (-5, "memory.max = 1"))
    assert memory.memory_left() == (0, "memory.max = 1")
    for name in ("_cgroup_memory", "_machine_memory"):
        monkeypatch.setattr(memory, name, lambda root: None)
    assert memory.memory_left() is None


def test_size_beyond_all_floats_raises():
    with pytest.raises(ValueError, match=r"0 GiB\) does not fit into host memory"):
        memory.check_memory(10**400)


def test_pool_beyond_cgroup_limit_raises(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_memory", lambda root: (1 << 20, "memory.max = 1048576"))
    with pytest.raises(ValueError, match=r"2097152 bytes .* 1048576 bytes .* are left by memory.max = 1048576"):
        HostPool(2, 1 << 20)
    HostPool(1, 1 << 20, pin=False)
