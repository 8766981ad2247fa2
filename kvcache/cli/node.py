"""`kvcache node`: own the host pool of a machine as a service, so that its blocks outlive the engines."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer


def node(
    config: Annotated[
        Path,
        typer.Argument(
            help="A JSON file of the engines' kv-transfer-config, or of its kv_connector_extra_config.",
            show_default=False,
        ),
    ],
) -> None:
    """Own the pool of a machine's engines until a SIGTERM."""
    from kvcache.integrations.vllm.settings import node_options, read_config
    from kvcache.node.owner import Owner
    from kvcache.node.protocol import check_name, node_folder

    extra_config = json.loads(config.read_text())
    if not isinstance(extra_config, dict):
        raise ValueError(f"{config} must hold a mapping, got {type(extra_config).__name__}")
    extra_config = extra_config.get("kv_connector_extra_config", extra_config)
    if extra_config.get("node_pool") is True:
        raise ValueError(f"'node_pool' in {config} must be a name: only an engine can derive one from its model")
    check_name(extra_config.get("node_pool"))
    settings = read_config(extra_config).settings
    folder = node_folder(extra_config["node_pool"])
    # An owner that a user started waits for engines without end; one that an engine started ends after the last one.
    owner = Owner(folder, node_options(extra_config, settings), linger_s=None)
    signal.signal(signal.SIGTERM, owner.stop)
    print(f"kvcache: serves {folder}", flush=True)
    try:
        owner.run()
    except KeyboardInterrupt:
        owner.close()
