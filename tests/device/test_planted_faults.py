"""The tests of transfers find planted faults: each one fails a named test on one of 20 schedules."""

from contextlib import nullcontext
from inspect import signature

import pytest
import test_transfers as tests
import torch
from bench import DEVICE, LATE, Bench

from kvcache.transfer import staged
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import StagedCopyHandler
from kvcache.transfer.streams import DeviceStream

pytestmark = pytest.mark.skipif(LATE is None, reason="needs the schedules of the simulated device")

FAULTS = {}


def fault(*scenarios):
    """Register a function that plants a fault, and the tests of which one must fail."""

    def register(plant):
        FAULTS[plant.__name__] = plant, scenarios
        return plant

    return register


class Event:
    """An event whose methods a fault replaces."""

    def __init__(self, event):
        self.event = event

    def query(self):
        return self.event.query()

    def synchronize(self):
        self.event.synchronize()

    def elapsed_time(self, end):
        return self.event.elapsed_time(end.event)


def plant_event(patch, **methods):
    record = DeviceStream.record_event
    event = type("FaultyEvent", (Event,), methods)
    patch.setattr(DeviceStream, "record_event", lambda self, timing=False: event(record(self, timing)))


def engine_stream():
    return torch.accelerator.current_stream(DEVICE)


# --- order ----------------------------------------------------------------------------------------------------------


@fault(tests.test_store_waits_for_the_compute_stream)
def no_wait_for_compute_of_stores(patch):
    patch.setattr(DeviceStream, "wait_for_compute", lambda self: None)


@fault(tests.test_load_does_not_overwrite_blocks_that_are_still_read)
def no_wait_for_compute_of_loads(patch):
    patch.setattr(DeviceStream, "wait_for_compute", lambda self: None)


@fault(tests.test_each_store_waits_for_compute_though_others_are_in_flight)
def no_wait_for_compute_while_jobs_are_in_flight(patch):
    transfer, wait = StagedCopyHandler.transfer_async, DeviceStream.wait_for_compute

    def transfer_async(self, job_id, spec):
        self._stream.is_busy = bool(self._jobs)
        return transfer(self, job_id, spec)

    patch.setattr(StagedCopyHandler, "transfer_async", transfer_async)
    patch.setattr(DeviceStream, "wait_for_compute", lambda self: None if self.is_busy else wait(self))


@fault(tests.test_transfer_submitted_during_a_capture_fails)
def capture_of_the_compute_stream_unnoticed(patch):
    def wait_for_compute(self):
        self._stream.wait_stream(engine_stream())

    patch.setattr(DeviceStream, "wait_for_compute", wait_for_compute)


@fault(tests.test_transfer_fails_while_its_own_stream_is_captured)
def capture_of_our_stream_unnoticed(patch):
    def wait_for_compute(self):
        assert not engine_stream().is_capturing()
        self._stream.wait_stream(engine_stream())

    patch.setattr(DeviceStream, "wait_for_compute", wait_for_compute)


@fault(tests.test_both_directions_overlap)
def copies_on_the_engines_stream(patch):
    patch.setattr(DeviceStream, "queueing", lambda self: nullcontext())
    patch.setattr(DeviceStream, "wait_for_compute", lambda self: None)
    patch.setattr(DeviceStream, "record_event", lambda self, timing=False: record_on(engine_stream()))


def record_on(stream):
    event = torch.Event(device=DEVICE, enable_timing=True)
    event.record(stream)
    return event


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def events_on_the_engines_stream(patch):
    patch.setattr(DeviceStream, "record_event", lambda self, timing=False: record_on(engine_stream()))


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def end_recorded_before_the_copies(patch):
    record = DeviceStream.record_event

    def record_event(self, timing=False):
        self.events = [*getattr(self, "events", []), record(self, timing)]
        return self.events[-1 if len(self.events) % 2 else -2]

    patch.setattr(DeviceStream, "record_event", record_event)


@fault(tests.test_bytes_return_after_store_and_load)
def layers_gathered_after_the_link(patch):
    def swapped(self, device, host):
        crossed = []
        patch.setattr(self, "_cross", lambda *arguments: crossed.append(arguments))
        queue(self, device, host)
        patch.delattr(self, "_cross")
        # All copies over the link first.
        for arguments in crossed:
            StagedCopyHandler._cross(self, *arguments)

    queue = StagedCopyHandler._queue
    patch.setattr(StagedCopyHandler, "_queue", swapped)


@fault(tests.test_bytes_return_after_store_and_load)
def directions_swapped(patch):
    queue = staged._Gather.queue
    patch.setattr(staged._Gather, "queue", lambda self, ids, into: queue(self, ids, not into))


# --- ends -----------------------------------------------------------------------------------------------------------


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def event_is_always_done(patch):
    plant_event(patch, query=lambda self: True)


@fault(tests.test_wait_blocks_the_host_until_the_bytes_are_there)
def wait_does_not_block(patch):
    plant_event(patch, synchronize=lambda self: None)


@fault(tests.test_nothing_synchronises)
def polling_blocks(patch):
    plant_event(patch, query=lambda self: (self.event.synchronize(), True)[1])


@fault(tests.test_transfer_time_is_that_of_the_copy)
def negative_time(patch):
    plant_event(patch, elapsed_time=lambda self, end: end.event.elapsed_time(self.event))


@fault(tests.test_wait_returns_after_all_its_jobs)
def wait_for_the_first_job_only(patch):
    wait = StagedCopyHandler.wait

    def first(self, job_ids):
        wait(self, sorted(job_ids)[:1])

    patch.setattr(StagedCopyHandler, "wait", first)


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def all_jobs_end_with_the_first(patch):
    ended = StagedCopyHandler._has_ended

    def has_ended(self, job):
        return job is not next(iter(self._jobs.values())) or ended(self, job)

    patch.setattr(StagedCopyHandler, "_has_ended", has_ended)


@fault(tests.test_job_that_failed_half_way_ends_after_its_first_half)
def half_queued_job_reported_at_once(patch):
    ended = StagedCopyHandler._has_ended
    patch.setattr(StagedCopyHandler, "_has_ended", lambda self, job: job.failed or ended(self, job))


@fault(tests.test_job_in_flight_stays_during_the_capture_of_another_stream)
def event_that_raises_ends_its_job(patch):
    patch.setattr(StagedCopyHandler, "_is_lost", lambda self, error: True)


@fault(tests.test_shutdown_returns_after_the_last_copy)
def shutdown_does_not_wait(patch):
    patch.setattr(StagedCopyHandler, "wait", lambda self, job_ids: None)


@fault(tests.test_handler_dropped_in_flight_waits_for_the_device)
def dropped_handler_does_not_wait(patch):
    patch.delattr(StagedCopyHandler, "__del__")


# --- memory ---------------------------------------------------------------------------------------------------------


@fault(tests.test_both_directions_at_once_share_no_memory)
def one_staging_buffer_for_both_directions(patch):
    buffers = []
    allocate = staged._allocate

    def shared(*arguments):
        buffers.append(allocate(*arguments))
        return buffers[0] if len(buffers) == 2 else buffers[-1]

    patch.setattr(staged, "_allocate", shared)


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def ids_on_the_engines_stream(patch):
    send = DeviceStream.send

    def on_engine(self, values):
        torch.accelerator.set_stream(self.engine)
        ids = send(self, values)
        torch.accelerator.set_stream(self._stream)
        return ids

    wait = DeviceStream.wait_for_compute

    def wait_for_compute(self):
        self.engine = engine_stream()
        wait(self)

    patch.setattr(DeviceStream, "wait_for_compute", wait_for_compute)
    patch.setattr(DeviceStream, "send", on_engine)


@fault(tests.test_jobs_in_a_row_keep_their_ids_and_staging)
def one_pinned_buffer_for_the_ids_of_all_jobs(patch):
    pinned = torch.empty(1024, dtype=torch.int64, pin_memory=True)

    def send(self, values):
        pinned.numpy()[: len(values)] = values
        return pinned[: len(values)].to(self.device, non_blocking=True)

    patch.setattr(DeviceStream, "send", send)


@fault(tests.test_job_larger_than_staging_returns_its_bytes)
def all_chunks_use_the_first_ids(patch):
    queue = staged._Gather.queue
    patch.setattr(staged._Gather, "queue", lambda self, ids, into: queue(self, first_of(ids), into))

    def first_of(ids):
        return ids.as_strided(ids.size(), ids.stride(), 0)


@fault(tests.test_copy_crosses_pieces_that_were_pinned_apart)
def copies_cross_pinned_pieces(patch):
    patch.setattr(staged, "_cut", lambda runs, first, piece: runs)


@fault(tests.test_other_current_device_changes_nothing)
def memory_pinned_for_the_current_device(patch):
    init = HostPool.__init__
    patch.setattr(HostPool, "__init__", lambda self, *args, device=None, **options: init(self, *args, **options))


# --- blocking calls and bytes ---------------------------------------------------------------------------------------


@fault(tests.test_nothing_synchronises)
def ids_sent_from_pageable_memory(patch):
    patch.setattr(DeviceStream, "send", lambda self, values: torch.from_numpy(values).to(self.device))


@fault(tests.test_nothing_synchronises)
def copies_block(patch):
    def copy_many(self, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    patch.setattr(DeviceStream, "copy_many", copy_many)


@fault(tests.test_nothing_synchronises)
def waiting_for_compute_blocks(patch):
    patch.setattr(DeviceStream, "wait_for_compute", lambda self: engine_stream().synchronize())


@fault(tests.test_nothing_synchronises)
def pool_is_not_pinned(patch):
    patch.setattr(HostPool, "pin", lambda self, progress=None, end=None: None)


@fault(tests.test_bytes_return_after_store_and_load)
def last_copy_left_out(patch):
    copy_many = DeviceStream.copy_many
    patch.setattr(DeviceStream, "copy_many", lambda self, targets, sources: copy_many(self, targets[1:], sources[1:]))


@fault(tests.test_bytes_return_after_store_and_load)
def padding_overwritten(patch):
    parts = staged._parts

    def wider(whole, firsts, sizes):
        return [part.as_strided((part.numel() + 1,), (1,)) for part in parts(whole, firsts, sizes)]

    patch.setattr(staged, "_parts", wider)
    patch.setattr(staged, "_UNSTAGED_BLOCKS", 1 << 30)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name):
    plant, scenarios = FAULTS[name]
    assert any(is_caught(plant, scenario, seed) for seed in range(20) for scenario in scenarios), "on no schedule"


def is_caught(plant, scenario, seed):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            with Bench(seed) as bench:
                scenario(bench, patch) if "monkeypatch" in signature(scenario).parameters else scenario(bench)
        except (Exception, pytest.fail.Exception):
            return True
    return False


def test_at_least_25_faults_are_planted():
    assert len(FAULTS) >= 25
