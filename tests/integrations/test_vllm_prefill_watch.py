"""The rate of prefill is that of the steps in which prompts were computed, and of no others."""

import pytest

from kvcache.integrations.vllm.prefill_watch import PrefillWatch


def watch():
    reports = []
    watched = PrefillWatch(16, lambda parts, seconds: reports.append((parts, seconds)))
    watched.on_step(0.0)
    return watched, reports


def test_prompt_steps_are_reported_together():
    watched, reports = watch()
    watched.on_lookup("a", 16)
    watched.on_lookup("a", 32)
    watched.on_lookup("b", 16)
    watched.on_lookup("c", 512)
    watched.on_load("b", [512, 1024])
    watched.on_store("a", range(16, 257, 16))
    watched.on_store("b", range(16, 1297, 16))
    watched.on_store("c", [512])  # a block that decoding has filled
    watched.on_step(0.5)
    # All blocks of the prompt are offered again.
    watched.on_store("a", range(16, 769, 16))
    watched.on_store("b", range(16, 1297, 16))
    watched.on_step(0.6)
    watched.on_store("a", range(16, 769, 16))
    watched.on_step(0.7)
    assert reports == [([(0, 256), (1024, 272)], 0.5), ([(256, 512)], 0.6 - 0.5)]


@pytest.mark.parametrize(("first_end", "end"), [(1040, 2048), (16, 256)], ids=["on the device", "nothing held"])
def test_device_and_repeated_blocks_are_uncomputed(first_end, end):
    watched, reports = watch()
    watched.on_lookup("a", first_end)
    # Once for each group of KV caches.
    for request in ("a", "a", "never looked up"):
        watched.on_store(request, range(16, end + 1, 16))
    watched.on_step(1.0)
    assert reports == [([(first_end - 16, end - first_end + 16)], 1.0)]


def test_idle_time_belongs_to_no_step():
    watched, reports = watch()
    watched.on_lookup("a", 16)
    watched.on_store("a", range(16, 257, 16))
    watched.on_request_finished("a")
    watched.on_lookup("b", None)
    watched.on_lookup("b", 16)
    watched.on_store("b", [])
    watched.on_step(100.0)
    watched.on_store("b", range(16, 257, 16))
    watched.on_step(101.0)
    # Another request of an ended one's name.
    watched.on_request_finished("b")
    watched.on_lookup("b", 1040)
    watched.on_store("b", range(1040, 2049, 16))
    watched.on_step(102.0)
    assert reports == [([(0, 256)], 1.0), ([(1024, 1024)], 1.0)]
