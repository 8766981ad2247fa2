"""The free memory of the machine, and errors for pools that exceed it."""

import pytest

from kvcache.transfer import free_memory as memory
from kvcache.transfer.host_pool import HostPool


def write_cgroup(root, line, directory, limit, usage, stat, names):
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(line)
    path = root / "sys/fs/cgroup" / directory
    path.mkdir(parents=True)
    for name, value in zip(names, (limit, usage, stat), strict=True):
        (path / name).write_text(f"{value}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")


def test_a_cgroup_v2_limit_counts_what_is_used_less_the_page_cache(tmp_path):
    write_cgroup(tmp_path, "0::/a/b\n", "a/b", "1000", "600", "inactive_file 100\nactive_file 50", V2)
    assert memory._cgroup_memory(tmp_path) == (550, f"{tmp_path}/sys/fs/cgroup/a/b/memory.max = 1000")


def test_the_tightest_level_of_a_cgroup_v2_counts(tmp_path):
    write_cgroup(tmp_path, "0::/a/b\n", "a/b", "max", "600", "inactive_file 0", V2)
    for name, value in zip(V2, ("900", "800", ""), strict=True):
        (tmp_path / "sys/fs/cgroup/a" / name).write_text(value)
    assert memory._cgroup_memory(tmp_path)[0] == 100


def test_a_cgroup_v1_limit_is_found(tmp_path):
    line = "4:cpu:/x\n3:memory:/box\n0::/\n"
    write_cgroup(tmp_path, line, "memory/box", "1000", "300", "total_inactive_file 50\ntotal_active_file 0", V1)
    assert memory._cgroup_memory(tmp_path)[0] == 750


def test_a_container_that_sees_its_group_at_the_root_is_limited(tmp_path):
    write_cgroup(tmp_path, "3:memory:/docker/abc\n", "memory", "1000", "300", "", V1)
    assert memory._cgroup_memory(tmp_path)[0] == 700


def test_without_a_limit_there_is_none(tmp_path):
    write_cgroup(tmp_path, "0::/a\n", "a", "max", "600", "", V2)
    assert memory._cgroup_memory(tmp_path) is None
    assert memory._cgroup_memory(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("limit", "usage", "stat"),
    [("a lot", "600", ""), ("1000", "", ""), ("1000", "600", "inactive_file"), ("1000", "600", "inactive_file many")],
)
def test_a_limit_that_cannot_be_read_is_none(tmp_path, limit, usage, stat):
    write_cgroup(tmp_path, "no cgroup\n0::/a\n", "a", limit, usage, stat, V2)
    assert memory._cgroup_memory(tmp_path) is None


@pytest.mark.parametrize("text", ["MemAvailable:\n", "MemAvailable: much kB\n", "MemFree: 5 kB\n", ""])
def test_a_machine_that_does_not_say_has_no_limit(tmp_path, text):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    assert memory._machine_memory(tmp_path) is None
    assert memory._machine_memory(tmp_path / "nowhere") is None


def test_a_cgroup_beyond_its_limit_has_nothing_left(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_memory", lambda root: (-5, "memory.max = 1"))
    assert memory.memory_left() == (0, "memory.max = 1")


def test_a_size_beyond_all_floats_is_refused():
    with pytest.raises(ValueError, match=r"0 GiB\) does not fit into host memory"):
        memory.check_memory(10**400)


def test_a_pool_beyond_the_cgroup_limit_names_the_limit(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_memory", lambda root: (1 << 20, "memory.max = 1048576"))
    with pytest.raises(ValueError, match=r"2097152 bytes .* 1048576 bytes .* are left by memory.max = 1048576"):
        HostPool(2, 1 << 20)
    HostPool(1, 1 << 20, pin=False)
