"""vLLM's own tests of secondary tiers over KVCacheTier; by hand, with vLLM's sources unpacked.

``python tests/vllm/own_tests_of_vllm.py SOURCES disk|memory|URL [pytest's arguments]`` runs the tests of tiering in
vLLM's SOURCES. Our tier over a disk, memory or the Valkey at URL replaces the example tier and the fs tier. The tests
expect that the example tier ends a job when it is submitted, so here each job is waited for.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))

from engine_tiering import TIMEOUT_S, engine_spec_config, wait_until
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcache.integrations.vllm import KVCacheTier

WHERE = sys.argv[2] if len(sys.argv) > 2 else "disk"
KIND = WHERE if WHERE in ("disk", "memory") else "valkey"
FILES = ("test_tiering_offloading.py", "test_fs_tier.py", "test_factory.py", "test_metrics.py", "test_backpressure.py")
# These tests check the inside of vLLM's fs tier: files that they damage or make unwritable, functions that they
# replace, queues and fields that they read, and the type or the wording of an error.
INSIDE = (
    "test_invalid_path_raises_at_construction",
    "test_invalid_locality_raises_at_construction",
    "test_shutdown_discards_pending_tasks",
    "test_store_load_roundtrip_without_o_direct",
    "test_failed_load_corrects_verdict_and_removes_corrupt_file",
    "test_batched_partial_load_failure_keeps_loaded_blocks",
    "test_batched_load_first_block_fails_marks_whole_batch",
    "test_transient_load_failure_leaves_file",
    "test_mixed_job_results_emit_event_only_for_successful_job",
    "test_partially_failed_store_emits_no_event",
    "test_events_disabled_by_default",
    "test_events_require_global_kv_events_flag",
)


def options_of(view: memoryview, folder: str | None = None) -> dict[str, Any]:
    """Return the options of a tier of `KIND`, whose blocks only tiers of the same folder see."""
    folder = folder or tempfile.mkdtemp()
    options = {
        "disk": {"path": f"{folder}/kv", "capacity": "64MiB"},
        "memory": {"capacity": 64 * view.nbytes},
        "valkey": {"url": WHERE, "salt": folder},
    }
    # By default a tier takes stores of half of the host blocks, of which these tests have five.
    return {"kind": KIND, **options[KIND], "max_store_blocks": 1024}


def real_spec(mock: Any) -> Any:
    """Return one of vLLM's specs with the fields of a test's mock."""
    config = getattr(mock, "config", None)
    given = {}
    if isinstance(config, OffloadingConfig):
        parallel = config.parallel
        given = {
            "enable_events": config.enable_kv_cache_events,
            "tp": parallel.tp_size,
            "rank": parallel.rank,
            "is_agnostic": parallel.is_parallelism_agnostic,
            "replicated": config.replicated_layout,
        }
    return TieringOffloadingSpec(engine_spec_config({"cpu_bytes_to_use": 1 << 20}, **given))


class Chunks(dict[Any, bool]):
    """The chunks of an example tier: one that a test adds is stored."""

    def __init__(self, tier: Any) -> None:
        super().__init__()
        self._tier = tier
        self._ids = itertools.count(-1, -1)

    def __setitem__(self, key: Any, value: bool) -> None:
        job_id = next(self._ids)
        self._tier.submit_store(TransferJob(job_id, [key], np.zeros(1, np.int32), False, base.ReqContext("stored")))
        self._tier.completed_jobs[:] = [job for job in self._tier.completed_jobs if job.job_id != job_id]


def rows_of(view: memoryview) -> memoryview:
    """Return host blocks as rows of bytes, which vLLM's manager passes and its tests do not."""
    array = np.asarray(view)
    return memoryview(array.view(np.int8) if array.ndim == 2 else np.zeros((1, 16), np.int8))


class ExampleTier(KVCacheTier):
    """Our tier, which ends a job before it returns from its submission."""

    medium = base.Medium.CPU

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, custom_param: int = 0, **given: Any
    ) -> None:
        view = rows_of(primary_kv_view)
        super().__init__(real_spec(offloading_spec), view, tier_type, **given, **options_of(view))
        self._stored: set[bytes] = set()
        # Tests set the class's own.
        vars(self).pop("cache_hit_source", None)
        self.chunks = Chunks(self)

    @property
    def completed_jobs(self) -> list[Any]:
        return self._results

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return answered(self, super().lookup, key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        super().submit_store(job_metadata)
        self._stored.update(job_metadata.keys)
        KVCacheTier.drain_jobs(self)

    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        KVCacheTier.drain_jobs(self)

    def get_num_chunks(self) -> int:
        wait_until(lambda: self._controller.stats().tier.num_held == len(self._stored))
        return len(self._stored)


class FsTier(KVCacheTier):
    """Our tier by the constructor of vLLM's fs tier."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, root_dir: str, *numbers: int, **given: Any
    ) -> None:
        for name in ("n_read_threads", "n_write_threads", "store_batch_size", "load_batch_size", "use_o_direct"):
            given.pop(name, None)
        view = rows_of(primary_kv_view)
        super().__init__(real_spec(offloading_spec), view, tier_type, **given, **options_of(view, root_dir))
        self._folder = root_dir

    # The tests use these members of vLLM's tier: paths of blocks, events, and whether a look-up was answered.

    @property
    def file_mapper(self) -> Any:
        return SimpleNamespace(base_path=self._folder, get_file_name=self._path_of)

    def _path_of(self, key: bytes) -> str:
        is_held = self.lookup(key, base.ReqContext("path")) is base.LookupResult.HIT
        return f"{self._folder}{'' if is_held else '/missing'}"

    @property
    def events(self) -> list[Any] | None:
        return self._events if self._sends_events else None

    @property
    def _lookup_manager(self) -> Any:
        return SimpleNamespace(_pending_results=SimpleNamespace(empty=lambda: False))

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return answered(self, super().lookup, key, req_context)


def answered(tier: Any, lookup: Any, key: bytes, req_context: Any) -> Any:
    """Look up until the answer is known, as the scheduler does step by step."""
    end_s = time.monotonic() + TIMEOUT_S
    while (found := lookup(key, req_context)) is base.LookupResult.RETRY and time.monotonic() < end_s:
        tier._answers.clear()
        tier._controller.get_finished(1, tier.clock())
        time.sleep(0.001)
    tier._answers.clear()
    return found


def main() -> int:
    """Run the tests; return pytest's status."""
    sources, arguments = Path(sys.argv[1]), sys.argv[3:]
    folder = sources / "tests" / "v1" / "kv_offload" / "tiering"
    example.ExampleSecondaryTierManager = ExampleTier
    fs.FileSystemTierManager = FsTier
    os.chdir(tempfile.mkdtemp())
    files = [str(folder / name) for name in FILES]
    # A memory tier's blocks are its process's own.
    left_out = (*INSIDE, *(("test_fs_tier_cross_tp_round_trip",) if KIND == "memory" else ()))
    wanted = " and ".join(f"not {name}" for name in left_out)
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "-k", wanted, "--noconftest", f"--rootdir={folder}", *files, *arguments]
    )


if __name__ == "__main__":
    sys.exit(main())
