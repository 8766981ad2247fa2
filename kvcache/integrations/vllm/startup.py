"""Checks options before vLLM loads weights, as one of its general plugins.

vLLM makes an offloading spec after the model is on the device, a minute or more into the start. Its general plugins run
first, while it parses the command line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_OPTION = "--kv-transfer-config"


def check_command_line(arguments: Sequence[str] | None = None) -> None:
    """Raise if the words of the command (default `sys.argv`) give this adapter invalid options.

    ValueError names the option. ImportError: this release of vLLM has not been tried, or a package that an option needs
    is not installed. A command line that does not name this adapter is ignored. Options that a program passes to
    `vllm.LLM` are not visible here; the spec checks them.
    """
    for extra_config in _extra_configs(sys.argv if arguments is None else arguments):
        from kvcache.integrations.vllm.releases import installed_release
        from kvcache.integrations.vllm.settings import read_config

        use_engine_log()
        read_config(extra_config)
        installed_release()


def use_engine_log(
    ours: logging.Logger = logging.getLogger("kvcache"),  # noqa: B008
    engine: logging.Logger = logging.getLogger("vllm"),  # noqa: B008
) -> None:
    """Log to vLLM's handlers, unless kvcache's logger or the root logger is configured."""
    if ours.hasHandlers():
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
        ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(engine.level)


def _extra_configs(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the ``kv_connector_extra_config`` of each connector on the command line that uses this adapter."""
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option.replace("_", "-") != _OPTION:
            continue
        try:
            config = json.loads(value if equals else next(words, ""))
        except ValueError:
            continue  # vLLM reports it
        yield from _of_adapter(config)


def _of_adapter(config: Any) -> Iterator[dict[str, Any]]:
    extra_config = config.get("kv_connector_extra_config") if isinstance(config, dict) else None
    if not isinstance(extra_config, dict):
        return
    from kvcache.integrations.vllm.settings import uses_kvcache

    if uses_kvcache(extra_config):
        yield extra_config
    connectors = extra_config.get("connectors")  # of a MultiConnector
    for connector in connectors if isinstance(connectors, list) else ():
        yield from _of_adapter(connector)
