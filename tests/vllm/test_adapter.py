"""The adapter's own decisions, with vLLM's types and no engine."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.base import ReqContext as EngineContext

from kvcache import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    TransferResult,
)
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.status import StatusServer
from kvcache.integrations.vllm import KVCacheOffloadingSpec
from kvcache.integrations.vllm.manager import EngineRequest, KVCacheOffloadingManager
from kvcache.integrations.vllm.metrics import MetricsSource, metric_definitions
from kvcache.integrations.vllm.releases import installed_release
from kvcache.integrations.vllm.worker import KVCacheOffloadingWorker
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording
from kvcache.recorder.ops import Op
from kvcache.recorder.recorder import Recorder
from kvcache.registry import POLICIES


def manager(num_blocks=8, **options):
    return KVCacheOffloadingManager(CPUOffloadingManager(16, num_blocks, **options), installed_release())


def request(manager, req_id, keys, params=None):
    """Announce a request as the engine does: its context knows where each key's block ends."""
    context = EngineContext(req_id=req_id, kv_transfer_params=params)
    assert isinstance(manager.on_new_request(context), RequestOffloadingContext)
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (i + 1))
    return context


def store(manager, keys, context):
    """Store the blocks of a running request, and return the evicted keys."""
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(set(output.keys_to_store), context)
    return output.evicted_keys


def load(manager, keys, context):
    """Load blocks."""
    manager.prepare_load(keys, context)
    manager.complete_load(set(keys), context)


def serve(manager, req_id, keys, params=None):
    """Store the blocks of a request, end it, and return the evicted keys."""
    context = request(manager, req_id, keys, params)
    evicted = store(manager, keys, context)
    manager.on_request_finished(context)
    return evicted


def found(manager, *keys):
    """Return the answers to another request's look-ups."""
    context = request(manager, "asks", [])
    return [manager.lookup(key, context) for key in keys]


def keys_of(name, count):
    return [f"{name}{i}".encode() for i in range(count)]


def check_failed_store_is_announced(ours):
    keys = keys_of("a", 3)
    context = request(ours, "a", keys)
    ours.prepare_store(keys, context)
    ours.complete_store(keys[:2], context, success=False)
    ours.complete_store(keys[2:], context, success=False)
    ours.prepare_store(keys[:1], context)
    announced = [(event.keys, event.removed, event.metadata_only) for event in ours.take_events()]
    assert announced == ([(keys[1:], True, True)] if installed_release().metadata_only else [])
    assert list(ours.take_events()) == []


def test_failed_store_is_announced_once_unoffered():
    check_failed_store_is_announced(manager(enable_events=True))
    keys = keys_of("a", 3)
    silent = manager()
    context = request(silent, "a", keys)
    silent.prepare_store(keys, context)
    silent.complete_store(keys, context, success=False)
    assert silent._failed == []


def test_every_method_of_engine_exists():
    for ours, theirs in (
        (KVCacheOffloadingManager, OffloadingManager),
        (KVCacheOffloadingWorker, OffloadingWorker),
        (KVCacheOffloadingSpec, OffloadingSpec),
    ):
        assert not inspect.isabstract(ours)
        for name, method in inspect.getmembers(ours, inspect.isfunction):
            base = getattr(theirs, name, None)
            if base is not None and not name.startswith("_"):
                wanted = list(inspect.signature(base).parameters)
                assert list(inspect.signature(method).parameters)[: len(wanted)] == wanted, name


def test_block_being_written_is_pending():
    adapter = manager()
    context = request(adapter, "r", [b"a", b"b"])
    assert found(adapter, b"a") == [LookupResult.MISS]
    assert adapter.prepare_store([b"a"], context).keys_to_store == [b"a"]
    assert found(adapter, b"a") == [LookupResult.HIT_PENDING]
    adapter.complete_store({b"a"}, context)
    assert found(adapter, b"a", b"b") == [LookupResult.HIT, LookupResult.MISS]


def test_store_keeps_order_and_pickles():
    adapter = manager()
    serve(adapter, "first", [b"b"])
    context = request(adapter, "second", [b"a", b"b", b"c"])
    output = adapter.prepare_store((key for key in (b"c", b"b", b"a")), context)
    assert output.keys_to_store == [b"c", b"a"]
    spec = pickle.loads(pickle.dumps(output.store_spec))
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids.tolist() == [1, 2]


# gittins declines the other request's blocks: they are worth no more than those that are there.
@pytest.mark.parametrize("policy", [name for name in POLICIES.names() if name != "gittins"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1,) * 6, (3, 1, 2)], ids=str)
def test_running_request_keeps_head_younger(policy, sizes):
    adapter = manager(num_blocks=6, cache_policy=policy)
    keys = keys_of("a", 6)
    context = request(adapter, "long", keys)
    left = list(keys)
    for size in sizes:
        store(adapter, [left.pop(0) for _ in range(size)], context)
    other = request(adapter, "other", keys_of("b", 6))
    evicted = [key for i in range(4) for key in store(adapter, [keys_of("b", 6)[i]], other)]
    assert evicted == [b"a5", b"a4", b"a3", b"a2"]


@pytest.mark.parametrize("is_late", [False, True], ids=["known", "late"])
@pytest.mark.parametrize("order", [(2, 3, 0, 1), (3, 2, 1, 0), (1, 3, 0, 2)], ids=str)
def test_running_request_is_ordered_by_positions(order, is_late):
    # Sliding windows have blocks stored late that stand early in the prompt; positions may come while it runs.
    adapter = manager(num_blocks=4)
    keys = keys_of("a", 4)
    context = request(adapter, "long", [] if is_late else keys)
    for i in order:
        context.set_offload_key_position(keys[i], 16 * (i + 1))
        store(adapter, [keys[i]], context)
    assert serve(adapter, "other", keys_of("b", 4)) == [b"a3", b"a2", b"a1", b"a0"]


def test_groups_are_interleaved_by_position():
    # Two KV-cache groups: the connector offers all of one, then all of the other.
    adapter = manager(num_blocks=6)
    full, window = keys_of("f", 3), keys_of("w", 3)
    context = request(adapter, "hybrid", full)
    for i, key in enumerate(window):
        context.set_offload_key_position(key, 16 * (i + 1))
    store(adapter, [*full[:2], *window[:2]], context)
    store(adapter, [full[2], window[2]], context)
    evicted = serve(adapter, "other", keys_of("b", 6))
    assert [sorted(evicted[i : i + 2]) for i in range(0, 6, 2)] == [[b"f2", b"w2"], [b"f1", b"w1"], [b"f0", b"w0"]]


# If the device still has a0, the engine loads from a1 on, and only the context names a0.
@pytest.mark.parametrize("loaded", [[b"a0", b"a1"], [b"a1"]], ids=str)
def test_use_counts_without_touch(loaded):
    adapter = manager(num_blocks=4)
    serve(adapter, "old", keys_of("a", 2))
    serve(adapter, "new", keys_of("b", 2))
    # "old" comes back; by first-in-first-out it would go next.
    context = request(adapter, "again", keys_of("a", 2))
    load(adapter, loaded, context)
    adapter.on_request_finished(context)
    assert serve(adapter, "other", keys_of("c", 3)) == [b"b1", b"b0", b"a1"]


def test_envelope_of_engine_is_executed():
    kv_hints = pytest.importorskip("vllm.v1.kv_hints")
    adapter = manager(num_blocks=8)
    actions = [
        kv_hints.KvHintAction("1", "kv.next_use", "1.0", {"next_use": "end", "session_id": "s"}),
        kv_hints.KvHintAction("2", "kv.prefetch", "1.0", {"session_id": "s"}),
    ]
    context = EngineContext(req_id="r", kv_hints=kv_hints.KvHintsEnvelope("0.1", "m", actions))
    adapter.on_new_request(context)
    store(adapter, keys_of("a", 2), context)
    adapter.on_request_finished(context)
    adapter.on_schedule_end()
    serve(adapter, "other", keys_of("b", 6))
    assert serve(adapter, "evicts", keys_of("c", 2)) == [b"a1", b"a0"]
    answers = {part.labels[0][1]: part.stats for part in adapter.hints.parts()}
    assert (answers["kv.next_use"].accepted, answers["kv.prefetch"].missing + answers["kv.prefetch"].rejected) == (1, 1)


@pytest.mark.parametrize("after_the_end", [False, True])
def test_transfers_may_end_in_any_order(after_the_end):
    adapter = manager(num_blocks=8)
    serve(adapter, "earlier", keys_of("b", 2))
    context = request(adapter, "r", keys_of("a", 6), {"kvcache": "no"})
    adapter.prepare_load(keys_of("b", 2), context)
    parts = [keys_of("a", 6)[i : i + 2] for i in (0, 2, 4)]
    for part in parts:
        adapter.prepare_store(part, context)
    if after_the_end:
        adapter.on_request_finished(context)
    for part in (parts[1], parts[2], parts[0]):
        adapter.complete_store(set(part), context)
    adapter.complete_load(set(keys_of("b", 2)), context)
    adapter.on_request_finished(EngineContext(req_id="never announced"))
    assert found(adapter, *keys_of("a", 6)) == [LookupResult.HIT] * 6
    stats = adapter._manager.stats()
    # A request that is over is not opened again: its bad hint counts once.
    assert (stats.num_pending, stats.num_referenced, stats.ignored_hints) == (0, 0, 1)


@pytest.mark.parametrize("is_reset", [True, False])
def test_store_that_ended_is_not_later(is_reset):
    adapter = manager()
    context = request(adapter, "r", keys_of("a", 3))
    adapter.prepare_store([b"a0", b"a1"], context)
    if is_reset:
        adapter.reset_cache()  # the engine discards the job
    else:
        adapter.complete_store({b"a0", b"a1"}, context, success=False)
    adapter.prepare_store([b"a0", b"a2"], context)
    adapter.complete_store({b"a0", b"a2"}, context)
    # A request that is older than a reset stores nothing.
    later = LookupResult.MISS if is_reset else LookupResult.HIT
    assert found(adapter, b"a0", b"a1", b"a2") == [later, LookupResult.MISS, later]


def test_next_use_counts_until_corrected():
    adapter = manager(num_blocks=4)
    ours = adapter._manager
    keys = keys_of("a", 3)
    context = request(adapter, "c-1-0f", keys, {"kvcache": {"next_use": "later"}})
    store(adapter, keys, context)
    adapter.on_request_finished(context)
    serve(adapter, "other", [b"x"])
    adapter.lookup(keys[0], request(adapter, "c-2-1f", keys[:1]))
    ours.hint(context.get_state(EngineRequest), "end")
    assert serve(adapter, "more", keys_of("b", 3)) == [b"a2", b"a1", b"a0"], "the tail first, and x after them"


def test_events_are_the_engines_local_ones():
    adapter = manager(num_blocks=2, enable_events=True)
    serve(adapter, "a", keys_of("a", 2))
    serve(adapter, "b", keys_of("b", 1))
    events = list(adapter.take_events())
    assert (events[0].locality, events[0].ownership) == (base.Locality.LOCAL, None)
    assert events[0].removal_expected
    assert [(set(event.keys), event.medium, event.removed) for event in events] == [
        ({b"a0", b"a1"}, Medium.CPU, False),
        ({b"a1"}, Medium.CPU, True),
        ({b"b0"}, Medium.CPU, False),
    ]
    assert list(adapter.take_events()) == []


def test_first_report_names_every_counter():
    sent = manager(num_blocks=2).get_stats().reduce()
    declared = metric_definitions()
    plain = [name for name, kind in declared.items() if type(kind) is OffloadingCounterMetadata and not kind.labelnames]
    counters = [name for name in plain if not name.endswith(("_bytes", "event_dropped")) and "_node_" not in name]
    assert {name: sent[name] for name in counters} == dict.fromkeys(counters, 0)
    assert len(counters) >= 15
    assert sent.keys() <= declared.keys()


@pytest.mark.parametrize("is_busy", [True, False])
def test_log_line_shows_what_operators_read(is_busy):
    line, records = KVConnectorLogging(None), []
    line.transfer_stats_accumulator = stats = OffloadingConnectorStats()
    for name, kind in (metric_definitions() | get_connector_metric_definitions()).items():
        labels = tuple(label.upper() for label in kind.labelnames)
        if type(kind) is OffloadingHistogramMetadata:
            stats.observe_histogram(name, 0.12345678901234567, labels)
        elif type(kind) is OffloadingCounterMetadata:
            is_fault = re.search("fail|drop|reject|corrupt", name) is not None
            stats.increase_counter(name, 0 if is_fault else 12_345_678 * is_busy, labels)
        else:
            stats.set_gauge(name, 0.12345678901234567, labels)
    line.log(lambda text, *values: records.append(logging.makeLogRecord({"msg": text, "args": values})))
    assert len(records[0].getMessage()) > 3000
    assert bool(logging.getLogger("vllm.v1.metrics.loggers").filter(records[0])) is is_busy
    assert len(records[0].getMessage()) < 500
    shown = ("kvcache_needed_blocks=12345678", "kvcache_tier_written_blocks:('TIER', 'MEDIUM')=12345678")
    assert [text in records[0].getMessage() for text in shown] == [is_busy] * 2


def test_get_stats_returns_declared_changes_only():
    adapter = manager(num_blocks=2)
    assert adapter.get_stats() is not None
    assert adapter.get_stats() is None
    serve(adapter, "a", keys_of("a", 2))
    context = request(adapter, "b", keys_of("a", 1), {"kvcache": "no"})
    adapter.lookup(b"a0", context)
    adapter.prepare_load([b"a0"], context)
    assert adapter.prepare_store(keys_of("b", 2), context) is None
    sent = adapter.get_stats().reduce()
    assert sent["vllm:kvcache_needed_tokens"] == 5 * adapter._manager.block_size
    assert {name: value for name, value in sent.items() if not name.endswith("_tokens")} == {
        "vllm:kvcache_needed_blocks": 5,
        "vllm:kvcache_loaded_blocks": 1,
        "vllm:kvcache_stored_blocks": 2,
        "vllm:kvcache_rejected_stores": 1,
        "vllm:kvcache_ignored_hints": 1,
        "vllm:kvcache_free_blocks": 0,
        "vllm:kvcache_referenced_blocks": 1,
    }
    assert sent.keys() <= metric_definitions().keys()
    assert found(adapter, b"b0", b"a0") == [LookupResult.MISS, LookupResult.HIT]


def test_metrics_source_omits_exporters_counters(sockets):
    ours = CPUOffloadingManager(16, 8)
    ours.telemetry = Telemetry(ours)
    server = StatusServer(ours.telemetry, path=str(sockets / "status"))
    try:
        assert any(part.name == "status" for part in ours.telemetry.parts())
        sent = MetricsSource(ours).changes()
    finally:
        server.close()
    assert sent is not None
    assert "vllm:kvcache_stored_blocks" in sent.reduce()
    assert sent.reduce().keys() <= metric_definitions().keys()


def test_repeated_lookups_count_once():
    adapter = manager(num_blocks=4)
    serve(adapter, "a", keys_of("a", 2))
    context = request(adapter, "b", keys_of("a", 2) + keys_of("b", 2))
    # The engine stops at the first miss, and asks again in every step in which the request has to wait.
    for _ in range(5):
        assert [adapter.lookup(key, context) for key in (b"a0", b"a1", b"b0")].count(LookupResult.HIT) == 2
    adapter.prepare_load(keys_of("a", 2), context)
    adapter.prepare_store(keys_of("b", 2), context)
    sent = adapter.get_stats().reduce()
    # 2 blocks of the first request, 2 loaded and 2 computed ones of the second.
    assert (sent["vllm:kvcache_needed_blocks"], sent["vllm:kvcache_loaded_blocks"]) == (6, 2)


def test_failed_copy_is_reported_not_raised():
    device = base.GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    worker = KVCacheOffloadingWorker.__new__(KVCacheOffloadingWorker)
    worker.transfers = Mock()
    worker.transfers.get_finished.return_value = [TransferResult(7, False, 0, 0.0, ("CPU", "GPU"))]
    (result,) = worker.get_finished()
    assert not result.success
    for refusal in (ValueError("block 9 of 8"), False):
        worker.transfers.transfer_async.side_effect = [refusal] * 2
        assert worker.submit_load(1, CPULoadStoreSpec([9]), device) is False
        assert worker.submit_store(2, device, CPULoadStoreSpec([9])) is False


def test_expedited_load_overtakes_waiting_loads():
    tensor = torch.arange(8 * 64, dtype=torch.int16).view(torch.int8).reshape(8, 128)[:, :64]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    worker = KVCacheOffloadingWorker(caches, 8, 1, num_copy_threads=1)
    expected = tensor[1].clone()
    assert worker.submit_store(1, base.GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0]), CPULoadStoreSpec([5]))
    worker.wait({1})
    assert [result.job_id for result in worker.get_finished()] == [1]
    # Other loads wait for a disk, say, and never end.
    loads, worker.transfers = worker.transfers, Mock()
    worker.transfers.get_finished.return_value = []
    device = base.GPULoadStoreSpec([3], group_sizes=[1], block_indices=[0])
    assert worker.submit_load(2, CPULoadStoreSpec([5]), device)
    assert worker.submit_load(3, CPULoadStoreSpec([5]), device, expedited=True)
    worker.wait({3})
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(3, True)]
    assert torch.equal(tensor[3], expected)
    assert [call.args[0] for call in worker.transfers.transfer_async.call_args_list] == [2]
    worker.transfers = loads
    worker.shutdown()


def test_late_recorder_sees_look_ups(tmp_path):
    ours = CPUOffloadingManager(16, 8)
    adapter = KVCacheOffloadingManager(ours, installed_release())
    with Recorder(ours, tmp_path / "run.kvlog"):
        for name in "abc":
            serve(adapter, name, keys_of(name, 4))
            assert found(adapter, f"{name}3".encode()) == [LookupResult.HIT]
    assert found(adapter, b"a0") == [LookupResult.MISS]
    recording = Recording(tmp_path / "run.kvlog")
    assert [record.op for record in recording].count(Op.STATUS) == 3
    assert replay_recording(recording).difference is None


def test_labels_survive_a_restart():
    parts = {"model": SimpleNamespace(name="org/model"), "parallel": SimpleNamespace(data_parallel_index=1)}
    labels = KVCacheOffloadingSpec._labels(SimpleNamespace(config=SimpleNamespace(**parts)))
    assert labels == {"engine": f"org/model@{socket.gethostname()}", "rank": "1"}


def test_wait_for_store_ends_at_deadline(monkeypatch):
    times_s = iter([0.0, 1.9, 2.0, 9.0, 9.0])
    monkeypatch.setattr(KVCacheOffloadingManager, "clock", lambda self: next(times_s))
    ours, keys = manager(), keys_of("a", 3)
    ours.lookup_deadline_s = 2.0
    storing, asking = request(ours, "stores", keys), request(ours, "asks", keys)
    ours.prepare_store(keys, storing)
    answers = [ours.lookup(keys[0], asking) for _ in range(4)]
    assert answers == [LookupResult.HIT_PENDING] * 2 + [LookupResult.MISS] * 2
    ours.complete_store(keys[:1], storing)
    assert ours.lookup(keys[0], asking) == LookupResult.HIT
    # A load ends the wait; the next one has a deadline of its own.
    ours.prepare_load(keys[:1], asking)
    assert ours.lookup(keys[1], asking) == LookupResult.HIT_PENDING
