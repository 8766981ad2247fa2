"""Fixtures over LMCache's own parts; skipped where LMCache is not installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["*.py"]
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def harness(tmp_path):
    """Make adapters over one directory; all of them are closed at the end."""
    from l2_harness import Harness

    made = []

    def make(**params):
        made.append(Harness(tmp_path / "l2", **params))
        return made[-1]

    yield make
    for one in made:
        one.adapter.close()


@pytest.fixture
def serve(tmp_path):
    """Start servers over one configuration of the adapter, one after the other."""
    from l2_harness import Server

    servers = []

    def start(adapter):
        servers.append(Server(tmp_path / "server.log", adapter))
        return servers[-1]

    yield start
    for server in servers:
        server.stop(kill=True)
