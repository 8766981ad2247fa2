"""What is logged at start, and how KVCACHE_LOG sets it up."""

import json
import logging

import pytest

import kvcache
from kvcache import CPUOffloadingSpec, OffloadingConfig, OffloadingGroup
from kvcache.assembly.log import set_up_log
from kvcache.options import without_secrets


@pytest.fixture(autouse=True)
def logger():
    logger = logging.getLogger("kvcache")
    kept = (logger.level, logger.propagate, list(logger.handlers))
    yield logger
    logger.level, logger.propagate, logger.handlers = kept[0], kept[1], kept[2]


def start(**options):
    extra_config = {"num_cpu_blocks": 8, **options}
    CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=extra_config)).get_manager()


def test_start_logs_configuration_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv("KVCACHE_LOG", "info")
    start(cache_policy="arc", store_threshold=2)
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith("kvcache")]
    found = json.loads(line.removeprefix("offloading starts: "))
    assert (found["block_size"], found["num_blocks"], found["cache_policy"]) == (16, 8, "arc")
    assert found["store_threshold"] == 2
    assert (found["engine"], found["rank"], found["version"]) == ("0", "0", kvcache.__version__)
    assert found["block_bytes"] == 0  # not known without refs


def test_secrets_are_left_out_everywhere():
    given = {
        "tiers": [{"url": "valkey://user:pw@host:1/0", "password": "pw", "options": {"auth_token": "t"}}],
        "API_KEY": "k",
        "num": 1,
    }
    assert without_secrets(given) == {
        "tiers": [{"url": "valkey://***@host:1/0", "password": "***", "options": {"auth_token": "***"}}],
        "API_KEY": "***",
        "num": 1,
    }


def test_debug_without_handlers_writes_to_stderr(logger, monkeypatch):
    monkeypatch.setenv("KVCACHE_LOG", "DEBUG")
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: bool(self.handlers))
    logger.handlers = []
    set_up_log()
    set_up_log()
    assert logger.level == logging.DEBUG
    assert (len(logger.handlers), logger.propagate) == (1, False)  # or each line is written twice
    assert logging.getLogger("kvcache.tiering.controller").isEnabledFor(logging.DEBUG)


def test_unknown_log_level_is_warned_of(logger, monkeypatch, caplog):
    before = logger.level
    monkeypatch.setenv("KVCACHE_LOG", "loud")
    start()
    assert "KVCACHE_LOG must be one of debug, info, warning, error, got 'loud'" in caplog.text
    assert logger.level == before


def test_without_the_variable_nothing_changes(logger, monkeypatch):
    monkeypatch.delenv("KVCACHE_LOG", raising=False)
    before = (logger.level, list(logger.handlers))
    set_up_log()
    assert (logger.level, logger.handlers) == before
