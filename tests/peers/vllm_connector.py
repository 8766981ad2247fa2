"""vLLM's tests of its OffloadingConnector, with our spec, manager and worker behind the mocks that they assert on.

A test scripts each answer of the manager. Our manager gets the same calls, and first holds each block that the script
calls a hit. It must answer as the script says, and our worker must copy the blocks of each job.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import vllm_model  # noqa: F401  (before vLLM)
from tests.v1.kv_connector.unit.offloading_connector import utils
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, PrepareStoreOutput

from kvcache.integrations.vllm import KVCacheOffloadingSpec
from kvcache.integrations.vllm.manager import EngineRequest

FOLDER = "tests/v1/kv_connector/unit/offloading_connector"
TESTS = (FOLDER, f"--confcutdir={FOLDER}")
PASSES = {"0.32.0": 559, "0.33.0": 649}
# gittins, the default policy, stores no block of a sliding window before the last window of a reply.
_EARLIER_WINDOW = "the policy leaves out blocks that only a prompt which ends earlier could need"
EXCLUDED = {
    "test_dcp_abort_reconsiders_final_swa_tail": "its configuration has no KV cache, which our spec refuses",
    "test_two_groups_full_and_sliding_window": _EARLIER_WINDOW,
    "test_no_annotation_marks_no_groups": _EARLIER_WINDOW,
}


class Script(MagicMock):
    """A mock whose answer to a call is passed, with the call's arguments, to `behind`, whose answer counts."""

    behind: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        answer = super().__call__(*args, **options)
        return answer if self.behind is None else self.behind(answer, *args, **options)


class Behind:
    """Our manager, called after the script has answered."""

    def __init__(self, ours: Any) -> None:
        self._ours = ours

    def _hold(self, keys: list[Any]) -> None:
        """Make the blocks hits that a test never stored, or whose store it has not ended."""
        pool = self._ours._pool
        for key in keys:
            pool.reserve_leading([key])
        pool.commit(keys, is_move=True)

    def _open(self, req_context: Any) -> None:
        if req_context.get_state(EngineRequest) is None:
            self._ours.on_new_request(req_context)

    def lookup(self, answer: Any, key: Any, req_context: Any) -> Any:
        if answer is not LookupResult.HIT:
            return answer
        self._hold([key])
        return self._ours.lookup(key, req_context)

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        self._open(req_context)
        spec = utils.MockLoadStoreSpec(keys)
        self._hold(spec.offload_keys)
        spec.ours = self._ours.prepare_load(spec.offload_keys, req_context)
        return spec

    def prepare_store(self, answer: Any, keys: Any, req_context: Any) -> Any:
        if not isinstance(answer, PrepareStoreOutput):
            return answer
        self._open(req_context)
        keys = answer.keys_to_store
        absent = [key for key, state in zip(keys, self._ours._pool.states(keys), strict=True) if not state]
        output = self._ours.prepare_store(keys, req_context)
        # Most scripts store a block again that they stored before. Ours has no copy for it.
        if output is not None and output.keys_to_store == absent:
            answer.store_spec.ours = output.store_spec if absent == keys else None
            return answer
        return output

    def __getattr__(self, name: str) -> Any:
        def call(answer: Any, *args: Any, **options: Any) -> Any:
            ours = getattr(self._ours, name)(*args, **options)
            if name == "take_events":
                list(ours)
            return answer

        return call


class Worker(utils.MockOffloadingWorker):
    """Our worker makes the copies of the jobs; the mock decides when they end."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self._ours = ours

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        super().submit_store(job_id, src_spec, dst_spec)
        return dst_spec.ours is None or self._ours.submit_store(job_id, src_spec, dst_spec.ours)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **options: Any) -> bool:
        super().submit_load(job_id, src_spec, dst_spec, **options)
        return self._ours.submit_load(job_id, src_spec.ours, dst_spec, **options)

    def complete_jobs(self, job_ids: set[int]) -> None:
        self._ours.wait(job_ids)
        assert all(result.success for result in self._ours.get_finished())
        super().complete_jobs(job_ids)


class Spec(utils.MockOffloadingSpec, KVCacheOffloadingSpec):
    """Our spec under the name of their mock."""

    def __init__(self, config: Any) -> None:
        super().__init__(replace(config, extra_config={"cpu_bytes_to_use": 1 << 20, **config.extra_config}))

    def get_manager(self) -> Any:
        # Our spec finds the windows in the frame of the connector, its caller.
        self._set_windows(inspect.currentframe().f_back)
        behind = Behind(KVCacheOffloadingSpec.get_manager(self))
        for name in vars(OffloadingManager):
            if not name.startswith("_"):
                getattr(self.manager, name).behind = getattr(behind, name)
        self.manager.prepare_load = behind.prepare_load
        return self.manager

    def get_worker(self, kv_caches: Any) -> Any:
        self.handler = Worker(KVCacheOffloadingSpec.get_worker(self, kv_caches))
        return self.handler


utils.MagicMock = Script
utils.MockOffloadingSpec = Spec
