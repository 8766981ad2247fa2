"""The tests beside Mooncake's storage backend in SGLang's wheel, with ours in its place.

Those beside the other backends test their clients (EIC, 3FS), assert on private parts (Tensorcast), call pools as an
older release had them (AIBrix) or use addresses of no memory (SiMM). The script of Mooncake's tests runs
`test_batch_operation` for the configurations in RANKS.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang_cpu  # noqa: F401  (before SGLang)
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store

from kvcache.integrations.sglang import KVCacheStorage

TESTS = (str(Path(mooncake_store.__file__).with_name("test_mooncake_store.py")), "--noconftest", "-p", __name__)
PASSES = {"0.5.23": 3}
EXCLUDED = {
    "test_single_operation": "passes addresses, as Mooncake's client takes them, in the place of pages",
    "test_batch_operation[mla-3of8]": "stores latent pages as the fourth rank; ours stores those of the first one",
}
RANKS = {"mha-0of1": (False, 0, 1), "mla-0of1": (True, 0, 1), "mha-1of4": (False, 1, 4), "mla-3of8": (True, 3, 8)}


class Storage(KVCacheStorage):
    """Ours by the configurations of their tests."""

    def __init__(self, config: Any) -> None:
        options = {"kind": "disk", "path": f"{tempfile.mkdtemp()}/l3", "capacity": "64MiB", "preallocate": False}
        super().__init__(replace(config, extra_config=options))

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        # Their mock of a pool lacks what SGLang's pools have.
        mem_pool_host.size = mem_pool_host.kv_buffer.nbytes // mem_pool_host.get_ksize_per_token()
        mem_pool_host.clear = lambda: None
        super().register_mem_pool_host(mem_pool_host)
        self.on_host_pools_registered()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "config" in metafunc.fixturenames:
        make = metafunc.module.make_hicache_storage_config
        configs = [make(is_mla_model=latent, tp_rank=rank, tp_size=size) for latent, rank, size in RANKS.values()]
        metafunc.parametrize("config", configs, ids=RANKS)


mooncake_store.MooncakeStore = Storage
