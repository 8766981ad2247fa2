"""What is checked before vLLM loads any weights: an entry point of its general plugins.

vLLM makes an offloading spec, and asks it for anything, only once the model is on the device: a minute or more into the
start. Its general plugins run first, while the command line is parsed.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_OPTION = "--kv-transfer-config"


def check_command_line(arguments: Sequence[str] | None = None) -> None:
    """Raise where the command line configures this adapter in a way that it refuses.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words of the command; `sys.argv` without them.

    Raises
    ------
    ValueError
        An option is missing or bad; the message names it.
    ImportError
        This release of vLLM has not been tried, or a package that an option needs is not installed.

    Notes
    -----
    Says nothing of a command line that does not name this adapter. What a program hands to `vllm.LLM` is not seen
    here; it is checked when the spec is made.
    """
    for extra_config in _extra_configs(sys.argv if arguments is None else arguments):
        from kvcache.integrations.vllm.releases import installed_release
        from kvcache.integrations.vllm.settings import read_settings

        use_engine_log()
        read_settings(extra_config)
        installed_release()


def use_engine_log(
    ours: logging.Logger = logging.getLogger("kvcache"),  # noqa: B008
    engine: logging.Logger = logging.getLogger("vllm"),  # noqa: B008
) -> None:
    """Show what the library logs where vLLM logs, unless somebody has configured its logger or the root's."""
    if ours.hasHandlers():
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
        ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(engine.level)


def _extra_configs(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the ``kv_connector_extra_config`` of every connector on the command line that names this adapter."""
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option.replace("_", "-") != _OPTION:
            continue
        try:
            config = json.loads(value if equals else next(words, ""))
        except ValueError:
            continue  # vLLM's to complain about
        yield from _of_adapter(config)


def _of_adapter(config: Any) -> Iterator[dict[str, Any]]:
    extra_config = config.get("kv_connector_extra_config") if isinstance(config, dict) else None
    if not isinstance(extra_config, dict):
        return
    if extra_config.get("spec_module_path") == __package__:
        yield extra_config
    connectors = extra_config.get("connectors")  # of a MultiConnector
    for connector in connectors if isinstance(connectors, list) else ():
        yield from _of_adapter(connector)
