"""The tests of transfers find planted faults: each one fails a named test on one of 20 schedules."""

from contextlib import nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest
import test_transfers as tests
import torch
from bench import DEVICE, LATE, Bench

from kvcache.transfer import staged
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import StagedCopyHandler
from kvcache.transfer.streams import DeviceStream

pytestmark = pytest.mark.skipif(LATE is None, reason="needs the schedules of the simulated device")

QUEUE, PARTS = staged._Gather.queue, staged._parts
TRANSFER, WAIT, ENDED = StagedCopyHandler.transfer_async, StagedCopyHandler.wait, StagedCopyHandler._has_ended
STREAM = {name: getattr(DeviceStream, name) for name in ("wait_for_compute", "record_event", "send", "copy_many")}
METHODS = {"query": torch.Event.query, "synchronize": torch.Event.synchronize}
METHODS["elapsed_time"] = lambda event, end: event.elapsed_time(end.event)
INIT = HostPool.__init__


def engine_stream():
    return torch.accelerator.current_stream(DEVICE)


def record_on_engine(self, timing=False):
    event = torch.Event(device=DEVICE, enable_timing=True)
    event.record(engine_stream())
    return event


def record_end_first(self, timing=False):
    self.events = [*getattr(self, "events", []), STREAM["record_event"](self, timing)]
    return self.events[-1 if len(self.events) % 2 else -2]


def wait_unless_ours_is_captured(self):
    assert not engine_stream().is_capturing()
    self._stream.wait_stream(engine_stream())


def events_with(**methods):
    """Return a `record_event` whose events have other methods, which get the true event first."""

    def record_event(self, timing=False):
        event = STREAM["record_event"](self, timing)
        return SimpleNamespace(event=event, **{n: partial(method, event) for n, method in (METHODS | methods).items()})

    return record_event


# By fault: the test that must fail, and the function that the fault replaces.
FAULTS = {
    # --- order ---
    "no_wait_for_compute_of_stores": (
        tests.test_store_waits_for_the_compute_stream,
        (DeviceStream, "wait_for_compute", lambda self: None),
    ),
    "no_wait_for_compute_of_loads": (
        tests.test_load_does_not_overwrite_blocks_that_are_still_read,
        (DeviceStream, "wait_for_compute", lambda self: None),
    ),
    "capture_of_the_compute_stream_unnoticed": (
        tests.test_transfer_submitted_during_a_capture_fails,
        (DeviceStream, "wait_for_compute", lambda self: self._stream.wait_stream(engine_stream())),
    ),
    "capture_of_our_stream_unnoticed": (
        tests.test_transfer_fails_while_its_own_stream_is_captured,
        (DeviceStream, "wait_for_compute", wait_unless_ours_is_captured),
    ),
    "copies_on_the_engines_stream": (
        tests.test_both_directions_overlap,
        (DeviceStream, "queueing", lambda self: nullcontext()),
        (DeviceStream, "wait_for_compute", lambda self: None),
        (DeviceStream, "record_event", record_on_engine),
    ),
    "events_on_the_engines_stream": (
        tests.test_jobs_in_a_row_keep_their_ids_and_staging,
        (DeviceStream, "record_event", record_on_engine),
    ),
    "end_recorded_before_the_copies": (
        tests.test_jobs_in_a_row_keep_their_ids_and_staging,
        (DeviceStream, "record_event", record_end_first),
    ),
    "directions_swapped": (
        tests.test_bytes_return_after_store_and_load,
        (staged._Gather, "queue", lambda self, ids, into: QUEUE(self, ids, not into)),
    ),
    # --- ends ---
    "event_is_always_done": (
        tests.test_jobs_in_a_row_keep_their_ids_and_staging,
        (DeviceStream, "record_event", events_with(query=lambda event: True)),
    ),
    "wait_does_not_block": (
        tests.test_wait_blocks_the_host_until_the_bytes_are_there,
        (DeviceStream, "record_event", events_with(synchronize=lambda event: None)),
    ),
    "polling_blocks": (
        tests.test_nothing_synchronises,
        (DeviceStream, "record_event", events_with(query=lambda event: event.synchronize() or True)),
    ),
    "negative_time": (
        tests.test_transfer_time_is_that_of_the_copy,
        (DeviceStream, "record_event", events_with(elapsed_time=lambda event, end: end.event.elapsed_time(event))),
    ),
    "wait_for_the_first_job_only": (
        tests.test_wait_returns_after_all_its_jobs,
        (StagedCopyHandler, "wait", lambda self, job_ids: WAIT(self, sorted(job_ids)[:1])),
    ),
    "all_jobs_end_with_the_first": (
        tests.test_jobs_in_a_row_keep_their_ids_and_staging,
        (
            StagedCopyHandler,
            "_has_ended",
            lambda self, job: job is not next(iter(self._jobs.values())) or ENDED(self, job),
        ),
    ),
    "half_queued_job_reported_at_once": (
        tests.test_job_that_failed_half_way_ends_after_its_first_half,
        (StagedCopyHandler, "_has_ended", lambda self, job: job.failed or ENDED(self, job)),
    ),
    "event_that_raises_ends_its_job": (
        tests.test_job_in_flight_stays_during_the_capture_of_another_stream,
        (StagedCopyHandler, "_is_lost", lambda self, error: True),
    ),
    "shutdown_does_not_wait": (
        tests.test_shutdown_returns_after_the_last_copy,
        (StagedCopyHandler, "wait", lambda self, job_ids: None),
    ),
    "dropped_handler_does_not_wait": (
        tests.test_handler_dropped_in_flight_waits_for_the_device,
        (StagedCopyHandler, "__del__", lambda self: None),
    ),
    # --- memory ---
    "all_chunks_use_the_first_ids": (
        tests.test_job_larger_than_staging_returns_its_bytes,
        (
            staged._Gather,
            "queue",
            lambda self, ids, into: QUEUE(self, ids.as_strided(ids.size(), ids.stride(), 0), into),
        ),
    ),
    "copies_cross_pinned_pieces": (
        tests.test_copies_are_correct_while_the_pool_is_pinned_in_the_background,
        (staged, "_cut", lambda runs, first, piece: runs),
    ),
    "memory_pinned_for_the_current_device": (
        tests.test_other_current_device_changes_nothing,
        (HostPool, "__init__", lambda self, *args, device=None, **options: INIT(self, *args, **options)),
    ),
    # --- blocking calls and bytes ---
    "ids_sent_from_pageable_memory": (
        tests.test_nothing_synchronises,
        (DeviceStream, "send", lambda self, values: torch.from_numpy(values).to(self.device)),
    ),
    "copies_block": (
        tests.test_nothing_synchronises,
        (DeviceStream, "copy_many", lambda self, *pairs: list(map(torch.Tensor.copy_, *pairs))),
    ),
    "waiting_for_compute_blocks": (
        tests.test_nothing_synchronises,
        (DeviceStream, "wait_for_compute", lambda self: engine_stream().synchronize()),
    ),
    "pool_is_not_pinned": (
        tests.test_nothing_synchronises,
        (HostPool, "pin", lambda self, progress=None, end=None: None),
    ),
    "last_copy_left_out": (
        tests.test_bytes_return_after_store_and_load,
        (
            DeviceStream,
            "copy_many",
            lambda self, targets, sources: STREAM["copy_many"](self, targets[1:], sources[1:]),
        ),
    ),
    "padding_overwritten": (
        tests.test_bytes_return_after_store_and_load,
        (staged, "_parts", lambda *args: [part.as_strided((part.numel() + 1,), (1,)) for part in PARTS(*args)]),
        (staged, "_UNSTAGED_BLOCKS", 1 << 30),
    ),
}


# --- faults with a state ----------------------------------------------------------------------------------------------


def fault(scenario):
    """Register a function that returns what its fault replaces, and the test that must fail."""

    def register(replaced):
        FAULTS[replaced.__name__] = scenario, replaced
        return replaced

    return register


@fault(tests.test_each_store_waits_for_compute_though_others_are_in_flight)
def no_wait_for_compute_while_jobs_are_in_flight():
    def transfer_async(self, job_id, spec):
        self._stream.is_busy = bool(self._jobs)
        return TRANSFER(self, job_id, spec)

    yield StagedCopyHandler, "transfer_async", transfer_async
    wait = STREAM["wait_for_compute"]
    yield DeviceStream, "wait_for_compute", lambda self: None if self.is_busy else wait(self)


@fault(tests.test_bytes_return_after_store_and_load)
def layers_gathered_after_the_link():
    queue, cross = StagedCopyHandler._queue, StagedCopyHandler._cross

    def queue_copies_first(self, device, host):
        crossed = []
        self._cross = lambda *arguments: crossed.append(arguments)
        queue(self, device, host)
        del self._cross
        for arguments in crossed:
            cross(self, *arguments)

    yield StagedCopyHandler, "_queue", queue_copies_first


@fault(tests.test_both_directions_at_once_share_no_memory)
def one_staging_buffer_for_both_directions():
    buffers, allocate = [], staged._allocate

    def shared(*arguments):
        buffers.append(allocate(*arguments))
        return buffers[0] if len(buffers) == 2 else buffers[-1]

    yield staged, "_allocate", shared


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def ids_on_the_engines_stream():
    def send(self, values):
        torch.accelerator.set_stream(self.engine)
        ids = STREAM["send"](self, values)
        torch.accelerator.set_stream(self._stream)
        return ids

    def wait_for_compute(self):
        self.engine = engine_stream()
        STREAM["wait_for_compute"](self)

    yield DeviceStream, "wait_for_compute", wait_for_compute
    yield DeviceStream, "send", send


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def one_pinned_buffer_for_the_ids_of_all_jobs():
    pinned = torch.empty(1024, dtype=torch.int64, pin_memory=True)

    def send(self, values):
        pinned.numpy()[: len(values)] = values
        return pinned[: len(values)].to(self.device, non_blocking=True)

    yield DeviceStream, "send", send


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name):
    scenario, *replaced = FAULTS[name]
    assert any(is_caught(replaced, scenario, seed) for seed in range(20)), "on no schedule"


def is_caught(replaced, scenario, seed):
    with pytest.MonkeyPatch.context() as patch:
        for target, name, value in replaced[0]() if callable(replaced[0]) else replaced:
            patch.setattr(target, name, value)
        try:
            with Bench(seed) as bench:
                scenario(bench, patch) if "monkeypatch" in signature(scenario).parameters else scenario(bench)
        except (Exception, pytest.fail.Exception):
            return True
    return False
