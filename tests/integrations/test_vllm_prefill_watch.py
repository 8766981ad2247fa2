"""The rate of prefill is that of the steps in which prompts were computed, and of no others, in any order of calls."""

import pytest

from kvcache.integrations.vllm.prefill_watch import PrefillWatch

# Whether blocks are offered before the call that ends a step, and what the watch expects.
orders = pytest.mark.parametrize(
    ("offers_first", "expects_first"), [(True, True), (True, False), (False, True), (False, False)]
)


class Steps:
    """Steps of an engine that makes its calls in one order; `num_ahead` steps are scheduled before one is computed."""

    def __init__(self, offers_first, expects_first, num_ahead=0):
        self.reports = []
        self.watch = PrefillWatch(16, lambda parts, seconds: self.reports.append((parts, seconds)), expects_first)
        self.offers_first = offers_first
        self.num_ahead = num_ahead
        self.num_running = 0

    def step(self, now_s, stores=(), finished=()):
        """Schedule a step that offers blocks of requests by their ends, and end the oldest one that runs."""
        if not self.offers_first:
            self.watch.on_step(now_s)
        for request, ends in stores:
            self.watch.on_store(request, ends)
        for request in finished:
            self.watch.on_request_finished(request)
        if self.offers_first:
            self.watch.on_step(now_s)
        self.num_running += 1
        if self.num_running > self.num_ahead:
            self.watch.on_output()
            self.num_running -= 1


@orders
def test_prompt_steps_are_reported_together(offers_first, expects_first):
    engine = Steps(offers_first, expects_first)
    watch = engine.watch
    watch.on_lookup("a", 16)
    watch.on_lookup("a", 32)
    watch.on_lookup("b", 16)
    watch.on_lookup("c", 512)
    watch.on_load("b", [512, 1024])
    # The block of "c" is one that decoding has filled.
    engine.step(0.0, [("a", range(16, 257, 16)), ("b", range(16, 1297, 16)), ("c", [512])])
    # All blocks of the prompt are offered again.
    engine.step(0.5, [("a", range(16, 769, 16)), ("b", range(16, 1297, 16))])
    engine.step(0.6, [("a", range(16, 769, 16))])
    engine.step(0.7)
    assert engine.reports == [([(0, 256), (1024, 272)], 0.5), ([(256, 512)], 0.6 - 0.5)]


@orders
def test_one_step_prompts_give_its_speed(offers_first, expects_first):
    engine = Steps(offers_first, expects_first)
    for number in range(5):
        engine.watch.on_lookup(number, 16)
        now_s = 100.0 * number
        engine.step(now_s, [(number, range(16, 1025, 16))])
        # The engine reports the end of the request to its parts, and waits.
        engine.step(now_s + 1.0, finished=[number])
    assert engine.reports == [([(0, 1024)], 1.0)] * 5


@pytest.mark.parametrize("offers_first", [True, False])
def test_step_scheduled_ahead_is_timed_alone(offers_first):
    engine = Steps(offers_first, offers_first, num_ahead=1)
    engine.watch.on_lookup("a", 16)
    engine.step(0.0, [("a", range(16, 1025, 16))])
    engine.step(0.0, [("a", range(1040, 2049, 16))])  # scheduled at once, computed from 1.0 on
    engine.step(1.0, [("a", range(2064, 3073, 16))])  # the first step has ended
    engine.step(3.0)
    engine.step(7.0)
    engine.step(7.1)
    assert engine.reports == [([(0, 1024)], 1.0), ([(1024, 1024)], 2.0), ([(2048, 1024)], 4.0)]


@orders
@pytest.mark.parametrize(("first_end", "end"), [(1040, 2048), (16, 256)], ids=["on the device", "nothing held"])
def test_device_and_repeated_blocks_are_uncomputed(first_end, end, offers_first, expects_first):
    engine = Steps(offers_first, expects_first)
    engine.watch.on_lookup("a", first_end)
    # Once for each group of KV caches.
    engine.step(0.0, [(request, range(16, end + 1, 16)) for request in ("a", "a", "never looked up")])
    engine.step(1.0)
    assert engine.reports == [([(first_end - 16, end - first_end + 16)], 1.0)]


@orders
def test_idle_time_belongs_to_no_step(offers_first, expects_first):
    engine = Steps(offers_first, expects_first)
    watch = engine.watch
    watch.on_lookup("a", 16)
    engine.step(0.0, [("a", range(16, 257, 16))], finished=["a"])
    watch.on_lookup("b", None)
    watch.on_lookup("b", 16)
    engine.step(100.0, [("b", [])])
    engine.step(200.0, [("b", range(16, 257, 16))])
    engine.step(201.0, finished=["b"])
    # Another request of an ended one's name.
    watch.on_lookup("b", 1040)
    engine.step(300.0, [("b", range(1040, 2049, 16))])
    engine.step(301.0)
    assert engine.reports == [([(0, 256)], 1.0), ([(1024, 1024)], 1.0)]


def test_unreported_outputs_leave_steps_bounded():
    engine = Steps(offers_first=False, expects_first=False, num_ahead=1000)
    for number in range(500):
        engine.watch.on_lookup(number, 16)
        engine.step(float(number), [(number, range(16, 257, 16))])
    assert (len(engine.watch._running), engine.reports) == (256, [])
