"""Every door names the limit of memory that its host blocks exceed, before it takes them."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kvcache.assembly.assemble import open_store, parse_tier
from kvcache.cli.findings import check_config
from kvcache.tiers.memory import MemoryOptions, MemoryTier
from kvcache.transfer import free_memory
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.shared_file import PREFIX, SharedBlocks

LIMITS = ("_cgroup_memory", "_shared_memory")
MIB = 1 << 20


@pytest.fixture(params=LIMITS)
def limit(request, monkeypatch):
    """A machine with room for 4 MiB, in its cgroup or in its shared memory."""
    monkeypatch.setattr(free_memory, request.param, lambda _: (4 * MIB, "memory.max"))
    return request.param


def refused(num_bytes):
    return pytest.raises(ValueError, match=rf"a pool of {num_bytes} bytes .* left by memory.max")


def test_shared_blocks_ask_for_both(limit, tmp_path):
    path = tmp_path / f"{PREFIX}a"
    with refused(5 * MIB):
        SharedBlocks(path, 5, MIB, is_owner=True)
    assert list(tmp_path.iterdir()) == []
    SharedBlocks(path, 4, MIB, is_owner=True).close()


def test_existing_blocks_are_not_asked_for(limit, tmp_path, monkeypatch):
    path = tmp_path / f"{PREFIX}a"
    owner = SharedBlocks(path, 4, MIB, is_owner=True)
    monkeypatch.setattr(free_memory, limit, lambda _: (0, "memory.max"))
    SharedBlocks(path, 4, MIB, is_owner=False).close()
    owner.close()


def test_private_memory_is_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(free_memory, "_cgroup_memory", lambda _: (4 * MIB, "memory.max"))
    with refused(5 * MIB):
        HostPool(5, MIB)
    with refused(5 * MIB):
        MemoryTier(MemoryOptions(5 * MIB), np.zeros((1, MIB), np.uint8))
    # SGLang and LMCache open stores, whose rows are in memory.
    with refused(64 * MIB):
        open_store(parse_tier({"type": "disk", "path": str(tmp_path / "kv"), "capacity": "4MiB"}), MIB, {})
    assert list(tmp_path.iterdir()) == []


def test_check_asks_for_pool_and_tiers(monkeypatch):
    monkeypatch.setattr(free_memory, "_cgroup_memory", lambda _: (4 * MIB, "memory.max"))
    given = {"spec_name": "tiering", "num_cpu_blocks": 3, "tiers": [{"type": "memory", "capacity": "1MiB"}]}
    assert "error" not in {finding.level for finding in check_config(given, block_bytes=MIB)}
    given["tiers"] *= 2
    errors = [finding.text for finding in check_config(given, block_bytes=MIB) if finding.level == "error"]
    assert len(errors) == 1
    assert "a pool of 5242880 bytes" in errors[0]


SPEC = textwrap.dedent("""
    import sys
    from kvcache import CanonicalKVCacheRef, OffloadingConfig, OffloadingGroup, make_spec
    tier = {"type": "disk", "path": sys.argv[1] + "/tier", "capacity": "4MiB"}
    options = {"spec_name": "tiering", "num_cpu_blocks": 120, "tiers": [tier], "pool_folder": sys.argv[2]}
    group = OffloadingGroup(16, ("a",), (CanonicalKVCacheRef(0, 1 << 20),))
    make_spec(OffloadingConfig((group,), 16, extra_config=options)).get_manager()
""")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a cgroup needs root")
def test_cgroup_limit_refuses_tiering_spec(tmp_path):
    parents = [line.partition(":memory:")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    parent = Path("/sys/fs/cgroup/memory") / next(filter(None, parents), "none").lstrip("/")
    group = parent / f"kvcache-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(90 * MIB))
        command = ["bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "bash", sys.executable, "-c", SPEC]
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvcache-test-") as folder:
            done = subprocess.run([*command, str(tmp_path), folder], capture_output=True, text=True, check=False)
            assert not [path for path in Path(folder).rglob("*") if path.is_file()]
        assert done.returncode == 1, done
        assert "does not fit into host memory" in done.stderr
        assert "memory.limit_in_bytes = 94371840" in done.stderr
    finally:
        group.rmdir()
