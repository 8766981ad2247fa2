"""Time to the first token: loading a prefix, computing it, and loading it with a loop of torch copies."""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvcache.specs import TransferResult


class TorchLoop:
    """The plain alternative to our worker: one torch copy for each layer of each block."""

    def __init__(self, worker: Any) -> None:
        geometry = worker.kv_caches
        self.tensors = [entry.tensor for entry in geometry.tensors]
        self.refs = geometry.group_data_refs[0]
        self.host = worker._pool.tensor
        self.ended: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        source, destination = spec
        load = source.medium() == "CPU"
        device, host = (destination, source) if load else (source, destination)
        for device_id, host_id in zip(device.block_ids.tolist(), host.block_ids.tolist(), strict=True):
            start = 0
            for ref in self.refs:
                there = self.tensors[ref.tensor_idx][device_id, : ref.page_size_bytes]
                here = self.host[host_id, start : start + ref.page_size_bytes]
                there.copy_(here) if load else here.copy_(there)
                start += ref.page_size_bytes
        self.ended.append(TransferResult(job_id, True, 0, 0.0, (source.medium(), destination.medium())))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        pass


def test_loading_beats_computing(boot: Any, models: Any, tokens: Any, capsys: Any) -> None:
    prefix = tokens(0, 2000)
    with boot(models["tall"], {}) as engine:

        def first_token_s(seed: int, host_too: bool) -> float:
            engine.drop_device_cache(host_too)
            start = time.perf_counter()
            engine.generate([prefix + tokens(seed, 7)], max_tokens=1)
            return time.perf_counter() - start

        ours = engine.worker._transfers
        loop = TorchLoop(engine.worker)
        times: dict[str, list[float]] = {"compute": [], "load": [], "torch loop": []}
        for seed in range(7):
            engine.worker._transfers = ours
            times["compute"].append(first_token_s(seed, host_too=True))
            # The last store is handed over in the step after.
            engine.generate([[3]])
            times["load"].append(first_token_s(seed, host_too=False))
            engine.worker._transfers = loop
            times["torch loop"].append(first_token_s(seed, host_too=False))
        engine.worker._transfers = ours
        loaded = engine.stats.loaded_blocks
    assert loaded == 2 * 7 * 62
    medians = {name: statistics.median(values) for name, values in times.items()}
    with capsys.disabled():
        told = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in medians.items())
        print(f"\nfirst token after a 2,000-token prefix: {told}")
    assert medians["compute"] >= 4 * medians["load"]
