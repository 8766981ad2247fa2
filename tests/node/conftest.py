"""The fixture of an owner in a thread, with clients in this process."""

import os
import sys
from pathlib import Path

import pytest

from kvcache.node import protocol
from kvcache.transfer.shared_file import make_private

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def idle_engines(monkeypatch):
    """An engine comes back to an owner when its test steps it."""
    monkeypatch.setattr("kvcache.node.client._IDLE_S", 3600.0)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch):
    """Keep pools apart from those of other tests and of the user's engines; a test that leaves one fails.

    An owner of another process looks for dead pools, and would remove a pool that is being made.
    """
    own = make_private(Path(f"/dev/shm/kvcache-test-{os.getpid()}"))
    monkeypatch.setattr(protocol, "private_folder", lambda: own)
    yield
    own.rmdir()


@pytest.fixture
def node():
    """A function that starts a `Node`; all are closed after the test."""
    from node_harness import Node

    nodes = []

    def make(*args, **options):
        nodes.append(Node(*args, **options))
        return nodes[-1]

    yield make
    for made in nodes:
        made.close()


@pytest.fixture
def place(node):
    """A node whose pool has 64 blocks."""
    return node(64)


@pytest.fixture
def engine(place):
    """The first engine of `place`."""
    return place.engine("a")


@pytest.fixture
def other(place, engine):
    """The second engine of `place`."""
    return place.engine("b")
