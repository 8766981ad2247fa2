"""Time to the first token: loading a prefix beside computing it."""

from __future__ import annotations

import statistics
import time
from typing import Any


def test_loading_beats_computing(boot: Any, models: Any, tokens: Any) -> None:
    prefix = tokens(0, 2000)
    with boot(models["tall"], {}) as engine:

        def first_token_s(seed: int, host_too: bool) -> float:
            engine.drop_device_cache(host_too)
            start = time.perf_counter()
            engine.generate([prefix + tokens(seed, 7)], max_tokens=1)
            return time.perf_counter() - start

        compute, load = [], []
        for seed in range(7):
            compute.append(first_token_s(seed, host_too=True))
            # The last store is handed over in the step after.
            engine.generate([[3]])
            load.append(first_token_s(seed, host_too=False))
        assert engine.stats.loaded_blocks == 7 * 62
    assert statistics.median(compute) >= 4 * statistics.median(load)
