"""KVCacheStorage: a tier of ours below the host memory of SGLang's HiCache.

SGLang evicts from host memory itself, backs pages up and prefetches them in its own threads, which wait for this class.
Each host pool (KV, and for hybrid models Mamba states or sliding windows) has pages of one size and a tier of its own.
No call raises into SGLang's threads: a page that cannot be stored or loaded is a miss.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from hashlib import blake2b
from threading import Lock
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.runtime_context import get_model, get_parallel, get_serving

from kvcache.assembly.assemble import OffloadSettings, open_exporters, open_store
from kvcache.assembly.log import set_up_log
from kvcache.control.telemetry import Telemetry
from kvcache.epoch import named
from kvcache.integrations.sglang.pages import Buffer, HostPages, bytes_of
from kvcache.integrations.sglang.settings import check_latent, part_of, read_config
from kvcache.tiering.store import KeyedStore
from kvcache.tiers.base.log_limiter import LogLimiter

_LOG = logging.getLogger(__name__)
# In a class with a method `set`, mypy takes `set[int]` for the method.
Lengths = set[int]
T = TypeVar("T")
_KV, _MAMBA = "kv", "mamba"
# Options that are part of a fingerprint only if they have another value, so that other servers keep their page names.
_IMPLIED = {
    "revision": None, "json_model_override_args": "{}", "quantization": None, "quantization_param_path": None,
    "modelopt_quant": None, "model_impl": "auto", "rl_quant_profile": None, "qsa_indexer_dtype": "auto",
}  # fmt: skip


class KVCacheStorage(HiCacheStorage):
    """SGLang's storage backend ``dynamic``.

    The `extra_config` of `storage_config` has the options of `StorageOptions` and of the tier. ValueError: an option is
    missing, unknown or invalid, or the tier cannot serve the ranks of this model. SGLang passes empty `kwargs`.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        set_up_log()
        self._options, settings = read_config(storage_config.extra_config or {})
        if storage_config.is_mla_model:
            check_latent(settings, storage_config.tp_size)
        self._config = storage_config
        self._dp_rank, self._num_replicas = _replica_of(storage_config)
        self._settings = settings.of_rank(str(self._dp_rank))
        self._has_rank_in_path = self._settings is not settings
        self._pages: dict[str, HostPages] = {}
        self._stores: dict[str, KeyedStore] = {}
        self._telemetry: Telemetry | None = None
        self._warnings = LogLimiter(_LOG)
        self._weight_version = _weight_version()
        # The name when host memory was last emptied: that of the weights of all pages in it.
        self._host_version = self._weight_version
        self._renaming = Lock()
        self._num_clears = 0
        # Since the last `get_stats`, by direction: pages and GB/s of each call.
        self._moves: dict[bool, list[tuple[int, float]]] = {False: [], True: []}

    # Registration: SGLang names its host pools, then `on_host_pools_registered` opens the tiers.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name_of(host_pool_name)
        if name in self._pages and self._pages[name].pool is host_pool:
            return
        self._add_pool(name, host_pool)
        if self._telemetry is not None:
            shares = self._options.shares or {}
            if name not in shares and hasattr(self._settings.options, "capacity"):
                raise ValueError(
                    f"the host pool {name!r} was registered after the tiers were opened: name its share of the "
                    f'capacity, as in "shares": {{"kv": 0.9, {name!r}: 0.1}}'
                )
            self._stores[name] = self._open(name, shares.get(name, 1.0))

    def _add_pool(self, name: str, pool: Any) -> None:
        self._pages[name] = HostPages(pool)
        empty = pool.clear

        def clear() -> None:
            empty()
            self._host_version = _weight_version()

        # SGLang names new weights, then ends its storage threads and clears each host pool.
        pool.clear = clear

    def on_host_pools_registered(self) -> None:
        """Open a tier for each pool; ValueError if that fails."""
        pages = {name: pages for name, pages in self._pages.items() if pages.page_bytes}
        shares = self._options.shares
        if shares is None:
            sizes = {name: host.page_bytes * host.num_pages for name, host in pages.items()}
            shares = {name: size / sum(sizes.values()) for name, size in sizes.items()}
        elif missing := pages.keys() - shares.keys():
            raise ValueError(f"shares must name the host pools {sorted(pages)}, {sorted(missing)} are missing")
        if (used := sum(shares[name] for name in pages)) < 0.99 and len(shares) <= len(pages):
            _LOG.warning("SGLang's storage: shares use %.0f %% of the capacity, the rest stays empty", 100 * used)
        # All or none: if one tier fails, the others must not keep their folders and threads.
        with ExitStack() as undo:
            stores = {}
            for name in pages:
                stores[name] = self._open(name, shares[name])
                undo.callback(stores[name].close)
            undo.pop_all()
        self._stores = stores
        page_bytes = next(iter(pages.values())).page_bytes if len(pages) == 1 else 0
        config = self._config
        rank = (self._dp_rank * config.pp_size + config.pp_rank) * config.attn_cp_size + config.attn_cp_rank
        labels = {"engine": str(self._dp_rank), "rank": str(rank * config.tp_size + config.tp_rank)}
        self._telemetry = Telemetry(None, block_bytes=page_bytes, labels=labels, config=self._settings.describe())
        self._telemetry.sources.append(lambda: [part for store in stores.values() for part in store.parts()])
        open_exporters(OffloadSettings(exporters=self._options.exporters), self._telemetry)
        for name, store in stores.items():
            stats = store.stats().tier
            text = "SGLang's storage: pool %s on %s, %d pages of %d bytes fit, %d held"
            _LOG.info(text, name, stats.medium, stats.num_blocks, store.block_bytes, stats.num_held)

    def _ranks(self, name: str) -> list[str]:
        """Return the ranks whose pages of a pool differ from those of others: all ranks share latent values."""
        config = self._config
        sizes = [("tp", config.tp_rank, config.tp_size), ("pp", config.pp_rank, config.pp_size)]
        sizes.append(("cp", config.attn_cp_rank, config.attn_cp_size))
        if config.is_mla_model and name != _MAMBA:
            del sizes[0]
        return [f"{kind}{rank}of{size}" for kind, rank, size in sizes if size > 1]

    def _open(self, name: str, share: float) -> KeyedStore:
        config, host = self._config, self._pages[name]
        ranks = self._ranks(name)
        replica = [f"dp{self._dp_rank}"] if self._dp_rank and not self._has_rank_in_path else []
        folder = "-".join([*replica, *ranks, name])
        num_ranks = config.tp_size * config.pp_size * config.attn_cp_size
        if not self._has_rank_in_path:
            num_ranks *= self._num_replicas
        fingerprint = {"engine": "sglang", "model": config.model_name, "pool": name, "ranks": ranks, **host.geometry()}
        fingerprint |= _unusual()
        settings = part_of(self._settings, folder, share, num_ranks)
        version = self._options.weights_version
        fingerprint = named(fingerprint, self._weight_version if version is None else version)
        return open_store(settings, host.page_bytes, fingerprint, labels=(("tier", name),))

    # Calls with addresses in the host pools.

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._move_pages(True, _KV, keys, host_indices, extra_info)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._move_pages(False, _KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {each.name: self._move_transfer(True, each, extra_info) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {each.name: self._move_transfer(False, each, extra_info) for each in transfers}

    def _move_transfer(self, is_load: bool, transfer: Any, extra_info: Any) -> list[bool]:
        return self._move_pages(
            is_load, _name_of(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
        )

    def _move_pages(
        self, is_load: bool, name: str, keys: list[str], host_indices: torch.Tensor, extra_info: Any
    ) -> list[bool]:
        host = self._pages.get(name)

        def move(store: KeyedStore) -> list[bool]:
            assert host is not None  # it has a store
            buffers = host.buffers(host_indices, len(keys))
            answers = self._move(is_load, name, store, keys, buffers)
            if is_load:
                host.set_pages(host_indices, buffers, answers)
            prefix = getattr(extra_info, "prefix_keys", None) or []
            # Touched in the order of the prompt, the tail of a prefix is evicted before its head.
            store.touch([_key(key) for key in [*prefix, *keys]])
            return answers

        return self._guarded(name, move, [self._is_index_only(name)] * len(keys))

    def _move(
        self, is_load: bool, name: str, store: KeyedStore, keys: Sequence[str], buffers: Sequence[Sequence[Buffer]]
    ) -> list[bool]:
        if not is_load and name != _MAMBA and not self._config.is_storage_writer:
            # The first rank stores what all ranks of a model with latent attention have.
            return [True] * len(keys)
        start_s = time.perf_counter()
        if is_load:
            answers = store.get([_key(key) for key in keys], buffers)
        else:
            with self._renaming:
                if self._host_version != self._weight_version:
                    # These pages waited while the weights changed, and are of the old ones.
                    return [False] * len(keys)
                answers = store.put([_key(key) for key in keys], buffers)
        if name == _KV and (num_moved := sum(answers)):
            gigabytes = num_moved * store.block_bytes / 1e9
            self._moves[is_load].append((num_moved, gigabytes / (time.perf_counter() - start_s)))
            # Without SGLang's metrics nothing takes them.
            del self._moves[is_load][:-1024]
        return answers

    def _guarded(self, name: str, call: Callable[[KeyedStore], T], otherwise: T) -> T:
        """Return what `call` returns for a pool's store, and `otherwise` without a store or after an exception."""
        store = self._stores.get(name)
        if store is None:
            return otherwise
        try:
            self._follow_weights()
            return call(store)
        except Exception as error:
            text = "SGLang's storage: a call for the pool %s failed and counts as a miss: %s: %s"
            self._warnings.warn(name, text, name, type(error).__name__, error)
            return otherwise

    def _follow_weights(self) -> None:
        """Forget all pages if SGLang's name of the weights has changed: it reports no update to its storage."""
        if _weight_version() == self._weight_version:
            return
        # Under the lock: no other call may begin before each store is cleared, and no store of a page may be running.
        with self._renaming:
            if (version := _weight_version()) != self._weight_version:
                for store in self._stores.values():
                    store.clear(version)
                self._weight_version = version

    def _is_index_only(self, name: str) -> bool:
        """Return whether a pool has no bytes of its own: then each of its pages counts as held."""
        return self._telemetry is not None and name in self._pages and not self._pages[name].page_bytes

    # Calls with flat pages of the KV pool.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        def load(store: KeyedStore) -> list[torch.Tensor | None]:
            new_page = self._pages[_KV].pool.get_dummy_flat_data_page
            targets = [new_page() if target is None else target for target in target_locations or [None] * len(keys)]
            pages = [target.contiguous() for target in targets]
            answers = self._move(True, _KV, store, keys, [[bytes_of(page)] for page in pages])
            store.touch([_key(key) for key in keys])
            for target, page, is_loaded in zip(targets, pages, answers, strict=True):
                if is_loaded and page is not target:
                    target.copy_(page)
            return [target if is_loaded else None for target, is_loaded in zip(targets, answers, strict=True)]

        return self._guarded(_KV, load, [None] * len(keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        def store_pages(store: KeyedStore) -> bool:
            pages = target_locations if values is None else values
            return all(self._move(False, _KV, store, keys, [[bytes_of(page.contiguous())] for page in pages]))

        return self._guarded(_KV, store_pages, False)

    # Look-ups.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._num_held(_KV, keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        num_pages = self._num_held(_KV, keys)
        hits: dict[Any, int] = {_KV: num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            name = _name_of(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, self._num_held(name, keys[:num_pages]) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                lengths = self._trailing(name, keys[:num_pages], max(1, len(transfer.keys or [])))
            else:
                # SGLang takes no verdict from a pool that is not reported.
                continue
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _num_held(self, name: str, keys: list[str]) -> int:
        otherwise = len(keys) if self._is_index_only(name) else 0
        return self._guarded(name, lambda store: store.num_held([_key(key) for key in keys]), otherwise)

    def _trailing(self, name: str, keys: list[str], num_trailing: int) -> Lengths:
        """Return the lengths of the prefixes of `keys` whose last `num_trailing` pages are held."""
        otherwise = [self._is_index_only(name)] * len(keys)
        is_held = self._guarded(name, lambda store: store.exists([_key(key) for key in keys]), otherwise)
        lengths, num_held = set(), 0
        for length, answer in enumerate(is_held, 1):
            num_held = num_held + 1 if answer else 0
            if num_held >= min(num_trailing, length):
                lengths.add(length)
        return lengths

    # Operation.

    def clear(self) -> bool:
        """Forget this model's pages, and no others; return whether it succeeded.

        Ranks that share pages also share later ones if SGLang clears all ranks at the same time. Other servers and
        later starts do not find these.
        """
        config = self._config
        self._num_clears += 1
        name = None
        if config.is_mla_model and config.tp_size > 1:
            place = f"{self._dp_rank}-{config.pp_rank}-{config.attn_cp_rank}-{self._num_clears}"
            name = _agree(f"kvcache-clear-{place}", config.tp_rank, config.tp_size, self._settings.config.deadline_s)
        return False not in [self._guarded(pool, lambda store: store.clear(name), False) for pool in list(self._stores)]

    def get_stats(self) -> Any:
        """Return SGLang's own metrics since the last call; ours are in the exporters."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loads, self._moves[True] = self._moves[True], []
        stores, self._moves[False] = self._moves[False], []
        return StorageMetrics(
            prefetch_pgs=[num_pages for num_pages, _ in loads],
            backup_pgs=[num_pages for num_pages, _ in stores],
            prefetch_bandwidth=[rate for _, rate in loads],
            backup_bandwidth=[rate for _, rate in stores],
        )

    def close(self) -> None:
        """Close the tiers: everything stored is durable then. A second call does nothing."""
        stores, self._stores = self._stores, {}
        if self._telemetry is not None:
            self._telemetry.close()
        for store in stores.values():
            store.close()
        for pages in self._pages.values():
            vars(pages.pool).pop("clear", None)


def _replica_of(config: Any) -> tuple[int, int]:
    """Return the data-parallel rank of this process, and the number of ranks that its server starts."""
    parallel = get_parallel()
    try:
        # Without data-parallel attention, the rank in `config` is 0 in every replica. None means one replica.
        return (config.dp_rank if parallel.dp_rank is None else parallel.dp_rank), parallel.num_dp_ranks
    except (AttributeError, RuntimeError, ValueError):
        # SGLang publishes its configuration in the processes of schedulers only.
        return config.dp_rank, 1


def _launch_store() -> Any:
    """Return torch's key-value store of this launch, which no other process can reach."""
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def _agree(topic: str, rank: int, num_ranks: int, wait_s: float) -> str | None:
    """Return a random name that all ranks of this launch get if all of them ask within `wait_s`; else None.

    The first rank draws the name only after all others have asked. So a rank that has missed a clear never gets the
    name of another clear, whose pages are of older weights.
    """
    asked = [f"{topic}-{other}" for other in range(1, num_ranks)]
    try:
        store, wait = _launch_store(), timedelta(seconds=wait_s)
        if rank == 0:
            store.wait(asked, wait)
            store.set(topic, f"clear-{secrets.token_hex(8)}")
        else:
            store.set(asked[rank - 1], "")
            store.wait([topic], wait)
        name: str = store.get(topic).decode()
    except Exception as error:  # any store of torch may raise; the pages stay private
        _LOG.warning("SGLang's storage: ranks share no page after this clear: %s: %s", type(error).__name__, error)
        return None
    return name


def _name_of(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _key(key: str) -> bytes:
    """Return a key of a tier: the 32 bytes of SGLang's hash, or the longer digest of another key."""
    try:
        name = bytes.fromhex(key)
    except ValueError:
        name = b""
    return name if len(name) == 32 and name.hex() == key else blake2b(key.encode()).digest()


def _unusual() -> dict[str, str]:
    """Return the options of SGLang that are set and change the values of pages."""
    try:
        options = get_model()
    except Exception:  # outside of a server
        return {}
    values = {name: getattr(options, name, implied) for name, implied in _IMPLIED.items()}
    return {name: str(value) for name, value in values.items() if value not in (None, _IMPLIED[name])}


def _weight_version() -> str | None:
    """Return the name of the weights that SGLang serves now, or None if no name was given."""
    try:
        version = get_serving().weight_version
    except Exception:  # outside of a server, or in a release without names
        return None
    return None if version in (None, "", "default") else str(version)
