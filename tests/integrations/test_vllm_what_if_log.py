"""The what-if that a serving engine logs, without vLLM."""

import logging
import threading

import pytest

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.integrations.vllm.what_if_log import log_what_if


def serve(manager, count):
    for number in range(count):
        context = ReqContext()
        keys = [b"%d" % (number % 3)]
        output = manager.prepare_store(keys, context)
        assert output is not None
        manager.complete_store(output.keys_to_store)
        manager.on_request_finished(context)


@pytest.mark.parametrize("num_requests", [0, 9])
def test_estimate_is_logged_when_engine_ends(num_requests, caplog):
    manager = CPUOffloadingManager(16, 8, what_if=True)
    log = log_what_if(manager)
    serve(manager, num_requests)
    with caplog.at_level(logging.INFO):
        log.stop(None)
        log.stop(None)
    start = "kvcache what-if:\nshare of blocks hit, by capacity"
    assert [record.getMessage().startswith(start) for record in caplog.records] == [True] * bool(num_requests)
    assert "kvcache-what-if" not in {thread.name for thread in threading.enumerate()}


def test_estimate_is_logged_while_serving(caplog):
    manager = CPUOffloadingManager(16, 8, what_if=True)
    serve(manager, 9)
    written = threading.Event()
    with caplog.at_level(logging.INFO, "kvcache.integrations.vllm.what_if_log"):
        logger = logging.getLogger("kvcache.integrations.vllm.what_if_log")
        logger.addFilter(lambda record: written.set() or True)
        log = log_what_if(manager, interval_s=0.001)
        try:
            assert written.wait(30)
        finally:
            log.stop(None)
            logger.filters.clear()
    # An unchanged estimate is logged once.
    assert len(caplog.records) == 1
