"""The check of options while vLLM parses its command line, without vLLM."""

import json
import logging
import tomllib
from pathlib import Path

import pytest

from kvcache.integrations.vllm import releases, startup

GOOD = {"cpu_bytes_to_use": 1 << 30}


def transfer_config(extra_config, module="kvcache.integrations.vllm"):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": module, **extra_config},
    }


@pytest.fixture
def asked(monkeypatch):
    """How often the installed release of vLLM was asked for."""
    asked = []
    monkeypatch.setattr(releases, "installed_release", lambda: asked.append("release"))
    return asked


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--kv_transfer_config"])
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cache_policy": "lur"}, "unknown policy 'lur'"),
        ({"exporters": ["kv_events"]}, "it was removed: vLLM publishes events with --kv-events-config"),
        ({"spec_name": "KVCacheOfloadingSpec"}, "KVCacheOfloading"),
    ],
)
def test_bad_option_fails_command_line_parsing(option, extra, message, asked):
    config = json.dumps(transfer_config({**GOOD, **extra}))
    for words in ([option, config], [f"{option}={config}"]):
        with pytest.raises(ValueError, match=message):
            startup.check_command_line(["vllm", "serve", "model", *words])
    assert asked == []


def test_good_configuration_has_its_release_checked(asked):
    startup.check_command_line(["vllm", "serve", "--kv-transfer-config", json.dumps(transfer_config(GOOD))])
    assert asked == ["release"]


def test_connector_among_several_is_checked(asked):
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer_config({})]}}
    with pytest.raises(ValueError, match="cpu_bytes_to_use"):
        startup.check_command_line(["vllm", "serve", "--kv-transfer-config", json.dumps(several)])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["serve", "model"],
        ["--kv-transfer-config"],
        ["--kv-transfer-config", "{not json"],
        ["--kv-transfer-config", "[1]"],
        ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": 1})],
        ["--kv-transfer-config", json.dumps(transfer_config({}, module="other.package"))],
    ],
)
def test_other_command_lines_are_left_alone(words, asked):
    startup.check_command_line(words)
    assert asked == []


def test_check_is_general_vllm_plugin():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert project["project"]["entry-points"]["vllm.general_plugins"] == {
        "kvcache": f"{startup.__name__}:{startup.check_command_line.__name__}"
    }


@pytest.mark.parametrize("is_configured", [False, True])
def test_use_engine_log_adds_engines_handlers(is_configured):
    ours, engine = logging.Logger("kvcache"), logging.Logger("vllm", logging.INFO)
    engine.addHandler(logging.NullHandler())
    own = [logging.NullHandler()] if is_configured else []
    ours.handlers += own
    for _ in range(2):
        startup.use_engine_log(ours, engine)
    assert (ours.handlers, ours.propagate) == (own or engine.handlers, is_configured)
    assert ours.level == (logging.NOTSET if is_configured else logging.INFO)
