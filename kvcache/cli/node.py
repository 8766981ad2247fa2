"""`kvcache node`: own the host pool of a machine as a service, so that its blocks outlive the engines."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer


def node(
    config: Annotated[
        Path, typer.Argument(help="The engines' JSON file, as `kvcache check` reads it.", show_default=False)
    ],
) -> None:
    """Own the pool of a machine's engines until a SIGTERM."""
    from kvcache.cli.findings import read_file
    from kvcache.integrations.vllm.settings import node_options, read_config
    from kvcache.node.owner import Owner, log_to_stderr
    from kvcache.node.protocol import check_name, node_folder

    extra_config = read_file(config)[0]
    if extra_config.get("node_pool") is True or "{model}" in json.dumps(extra_config):
        raise ValueError(f"'node_pool' in {config} must be a name without {{model}}: only an engine knows its model")
    check_name(extra_config.get("node_pool"))
    settings = read_config(extra_config).settings
    folder = node_folder(extra_config["node_pool"])
    log_to_stderr()
    # An owner that a user started waits for engines without end; one that an engine started ends after the last one.
    owner = Owner(folder, node_options(extra_config, settings), linger_s=None)
    signal.signal(signal.SIGTERM, owner.stop)
    print(f"kvcache: serves {folder}", flush=True)
    try:
        owner.run()
    except KeyboardInterrupt:
        owner.close()
