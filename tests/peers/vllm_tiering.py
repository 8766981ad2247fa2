"""vLLM's tests of secondary tiers, with `KVCacheTier` in the place of its example tier and its fs tier.

The tests expect that the example tier ends a job when it is submitted, so here each job is waited for.
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
import vllm_model  # noqa: F401  (before vLLM)

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("vllm", "references"))

from engine_tiering import engine_spec_config
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from waiting import wait_until

from kvcache.integrations.vllm import KVCacheTier

KIND = os.environ["PEERS_PLACE"]
FILES = ("tiering_offloading", "fs_tier", "factory", "metrics", "backpressure")
TESTS = (*(f"tests/v1/kv_offload/tiering/test_{name}.py" for name in FILES), "--noconftest")
PASSES = {"disk": {"0.32.0": 151, "0.33.0": 179}, "memory": {"0.32.0": 150, "0.33.0": 178}}[KIND]
_FILES_OF_FS = "damages or protects the files of vLLM's tier"
_PARTS_OF_FS = "reads or replaces private parts of vLLM's tier"
_ERRORS_OF_FS = "expects the type or the words of an error of vLLM's tier"
EXCLUDED = {
    "test_invalid_path_raises_at_construction": _ERRORS_OF_FS,
    "test_invalid_locality_raises_at_construction": _ERRORS_OF_FS,
    "test_shutdown_discards_pending_tasks": _PARTS_OF_FS,
    "test_store_load_roundtrip_without_o_direct": _PARTS_OF_FS,
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": _FILES_OF_FS,
    "test_batched_partial_load_failure_keeps_loaded_blocks": _FILES_OF_FS,
    "test_batched_load_first_block_fails_marks_whole_batch": _FILES_OF_FS,
    "test_transient_load_failure_leaves_file": _FILES_OF_FS,
    "test_mixed_job_results_emit_event_only_for_successful_job": _PARTS_OF_FS,
    "test_partially_failed_store_emits_no_event": _PARTS_OF_FS,
    "test_events_disabled_by_default": _PARTS_OF_FS,
    "test_events_require_global_kv_events_flag": _PARTS_OF_FS,
}
if os.environ["PEERS_RELEASE"] != "0.32.0":
    EXCLUDED |= {
        "test_config_info_keys_match_the_filled_values": _PARTS_OF_FS,
        "test_store_accepts_block_published_by_another_writer": _PARTS_OF_FS,
        "test_failed_load_after_abort_does_not_break_newer_probe": _PARTS_OF_FS,
    }
if KIND == "memory":
    EXCLUDED["test_fs_tier_cross_tp_round_trip"] = "the blocks of a memory tier end with it"


def options_of(view: memoryview, folder: str) -> dict[str, Any]:
    """Return the options of a tier of `KIND`; disk tiers of the same folder see the same blocks."""
    disk = {"path": f"{folder}/kv", "capacity": "64MiB", "preallocate": False}
    place = disk if KIND == "disk" else {"capacity": 64 * view.nbytes}
    # By default a tier takes stores of half of the host blocks, of which these tests have five.
    return {"kind": KIND, **place, "max_store_blocks": 1024}


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


def rows_of(view: memoryview) -> memoryview:
    """Return host blocks as rows of bytes, which vLLM's manager passes and its tests do not."""
    array = np.asarray(view)
    return memoryview(array.view(np.int8) if array.ndim == 2 else np.zeros((1, 16), np.int8))


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


class Tier(KVCacheTier):
    """Our tier in a folder; a look-up waits for its answer, as the scheduler does step by step."""

    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, folder: str, given: Any) -> None:
        view = rows_of(primary_kv_view)
        super().__init__(real_spec(offloading_spec), view, tier_type, **given, **options_of(view, folder))

    def lookup(self, key: bytes, req_context: Any) -> Any:
        end_s = time.monotonic() + 60
        while (found := super().lookup(key, req_context)) is base.LookupResult.RETRY and time.monotonic() < end_s:
            self._answers.clear()
            self._controller.get_finished(1, self.clock())
            time.sleep(0.001)
        self._answers.clear()
        return found


class ExampleTier(Tier):
    """Our tier, which ends a job before it returns from its submission."""

    medium = base.Medium.CPU

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, custom_param: int = 0, **given: Any
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, tempfile.mkdtemp(), given)
        self._stored: set[bytes] = set()
        # Tests set the class's own.
        vars(self).pop("cache_hit_source", None)
        self.chunks = Chunks(self)

    @property
    def completed_jobs(self) -> list[Any]:
        return self._results

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


class FsTier(Tier):
    """Our tier by the constructor of vLLM's fs tier, with the members that tests read."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, root_dir: str, *numbers: int, **given: Any
    ) -> None:
        for name in ("n_read_threads", "n_write_threads", "store_batch_size", "load_batch_size", "use_o_direct"):
            given.pop(name, None)
        super().__init__(offloading_spec, primary_kv_view, tier_type, root_dir, given)
        self.file_mapper = SimpleNamespace(base_path=root_dir, get_file_name=self._path_of)
        self._lookup_manager = SimpleNamespace(_pending_results=SimpleNamespace(empty=lambda: False))

    def _path_of(self, key: bytes) -> str:
        is_held = self.lookup(key, base.ReqContext("path")) is base.LookupResult.HIT
        return f"{self.file_mapper.base_path}{'' if is_held else '/missing'}"

    @property
    def events(self) -> list[Any] | None:
        return self._events


example.ExampleSecondaryTierManager = ExampleTier
fs.FileSystemTierManager = FsTier
