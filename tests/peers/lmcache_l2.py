"""LMCache's tests of L2 adapters and of what drives them, with ours in the place of its mock and fs adapters."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")

import lmcache
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, mock_l2_adapter

from kvcache.integrations.lmcache.adapter import KVCacheL2
from kvcache.integrations.lmcache.names import disk_key

FOLDER = "tests/v1/distributed"
FILES = (
    *("test_mock_l2_adapter", "test_fs_l2_adapter_delete", "test_fs_l2_adapter_keys", "test_prefetch_controller"),
    *("test_store_controller", "test_distributed_storage_manager", "test_l1_l2_state_metrics", "test_multi_l1"),
    *("test_multi_l1_serving", "test_multimodel", "serde/test_serde_e2e", "serde/test_serde_fs_e2e"),
    *("test_runtime_adapters", "test_cache_salt_l2_eviction", "test_report_status", "test_fault_inject_l2_adapter"),
    *("test_storage_manager_l2_keys", "test_l2_adapter_base", "test_eviction_extra_logging", "test_quota_manager"),
    "test_l2_adapter_factory",
)
TESTS = (*(f"{FOLDER}/{name}.py" for name in FILES), f"--confcutdir={FOLDER}")
PASSES = {"0.5.6": 388}
EXCLUDED = {
    "test_report_status_shape_with_l2": "reads the fields of the mock's own status",
    "test_fixed_affinity_loads_into_nondefault_l1": "waits for the files of LMCache's fs adapter",
    "test_write_serialize_clear_prefetch_deserialize": "waits for the files of LMCache's fs adapter",
}


class Mock(KVCacheL2):
    """Ours by the configuration of their mock, with the members that tests read."""

    def __init__(self, config: Any) -> None:
        self._bytes_per_s = config.mock_bandwidth_gb * 2**30
        # A tier for each size has a share of the capacity, so it is larger than the mock's.
        capacity = max(int(config.max_size_gb * 2**30), 64 << 20)
        path = f"{tempfile.mkdtemp()}/l2"
        super().__init__({"kind": "disk", "path": path, "capacity": capacity, "preallocate": False})
        self.set_backend_identity("mock")

    def _wait(self, memory: Any) -> None:
        time.sleep(sum(len(item.byte_array) for item in memory) / self._bytes_per_s)

    def _load(self, keys: Any, memory: Any) -> Any:
        self._wait(memory)
        return super()._load(keys, memory)

    def _store(self, keys: Any, memory: Any) -> Any:
        self._wait(memory)
        return super()._store(keys, memory)

    def report_status(self) -> dict[str, Any]:
        return {**super().report_status(), "stored_object_count": self.debug_get_stored_object_count()}

    def debug_get_stored_object_count(self) -> int:
        return sum(objects.store.stats().tier.num_held for objects in self._sizes.all())

    def debug_get_locked_key_count(self) -> int:
        return len(self._locks)

    def debug_has_key(self, key: Any) -> bool:
        return any(objects.store.exists([disk_key(key)])[0] for objects in self._sizes.all())


class Fs(KVCacheL2):
    """Ours in the directory of their fs adapter."""

    def __init__(self, config: Any) -> None:
        path = str(Path(config.base_path) / "l2")
        super().__init__({"kind": "disk", "path": path, "capacity": 64 << 20, "preallocate": False})
        self.set_backend_identity("fs")


# Most of these files skip themselves without an accelerator, which they do not use.
lmcache.torch_dev.is_available = lambda: True
mock_l2_adapter.MockL2Adapter = Mock
fs_l2_adapter.FSL2Adapter = Fs
