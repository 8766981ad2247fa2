"""A clock that stands still, for tests of what depends on time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvcache.lab.simulate.run import ReplayClock


@pytest.fixture
def clock() -> ReplayClock:
    """Return a clock of a manager; its `now_s` is set by hand."""
    from kvcache.lab.simulate.run import ReplayClock

    clock = ReplayClock()
    clock.now_s = 100.0
    return clock
