"""The version of a reset, on its way from the manager to a tier."""

import numpy as np
import pytest
from stores import Clock

from kvcache import (
    BackendOffloadingManager,
    CPUBackend,
    CPUOffloadingManager,
    ReqContext,
    TierConfig,
    TieredOffloadingManager,
)
from kvcache.recorder.recorder import Recorder
from kvcache.testing.tiers import ManualTier


class VersionedTier(ManualTier):
    """Keeps the versions that it is reset to; the first `num_errors` resets fail."""

    def __init__(self, num_errors=0):
        super().__init__(8, np.zeros((8, 4), np.uint8), is_automatic=True)
        self.versions = []
        self.num_errors = num_errors

    def reset(self, version=None):
        self.versions.append(version)
        if len(self.versions) <= self.num_errors:
            raise OSError("not now")
        super().reset(version)


@pytest.mark.parametrize("version", ["step 7", 7, None])
def test_reset_hands_version_to_tier(version):
    tier = VersionedTier()
    TieredOffloadingManager(8, 8, [tier]).reset_cache(version)
    assert tier.versions == [version]


def test_retried_reset_keeps_its_version():
    tier, clock = VersionedTier(num_errors=2), Clock()
    manager = TieredOffloadingManager(8, 8, [(tier, TierConfig(pause_s=2.0))], clock=clock)
    manager.reset_cache(version=7)
    for _ in range(5):
        clock.now_s += 1.5
        manager.on_schedule_end()
    assert tier.versions == [7, 7, 7]


def test_recorded_manager_takes_a_version(tmp_path):
    pytest.importorskip("msgspec")
    tier = VersionedTier()
    manager = TieredOffloadingManager(8, 8, [tier])
    Recorder(manager, tmp_path / "r.kvrec")
    manager.reset_cache(version=7)
    manager.reset_cache(8)
    assert tier.versions == [7, 8]
    manager.shutdown()


def test_manager_of_one_medium_ignores_version():
    manager = CPUOffloadingManager(8, 8)
    manager.prepare_store([b"a"])
    manager.reset_cache(version=7)
    assert manager.stats().num_free == 8
    manager.name_next_version(7)
    manager.reset_cache()
    assert manager.version_of_reset(None) is None


# A half of a surrogate pair, which JSON may carry, has no bytes; Python converts numbers of up to 4,300 digits only.
@pytest.mark.parametrize("version", [True, 1.5, "", b"v", "\ud800", pytest.param(10**5000, id="long")])
def test_useless_names_are_refused(version):
    tier = VersionedTier()
    manager = TieredOffloadingManager(8, 8, [tier])
    for call in (manager.reset_cache, manager.name_next_version):
        with pytest.raises(ValueError, match=r"version must be a str or an int, got |surrogates|digits"):
            call(version)
    manager.reset_cache()
    assert tier.versions == [None]


def test_named_version_counts_once():
    tiers = [VersionedTier(), VersionedTier(num_errors=1)]
    manager = TieredOffloadingManager(8, 8, tiers)
    manager.name_next_version("step 1")
    manager.name_next_version("step 2")
    for version in (None, None, "step 3"):
        manager.reset_cache(version)
    # A reset's own version is right, and a name that was meant for it must not reach a later one.
    manager.name_next_version("step 4")
    manager.reset_cache("step 5")
    manager.reset_cache()
    assert [tier.versions for tier in tiers] == [["step 2", None, "step 3", "step 5", None]] * 2


MANAGERS = {
    "cpu": lambda: CPUOffloadingManager(8, 8),
    "gittins": lambda: CPUOffloadingManager(8, 8, "gittins"),
    "backend": lambda: BackendOffloadingManager(CPUBackend(8, 8)),
    "tiered": lambda: TieredOffloadingManager(8, 8, [VersionedTier()]),
}
OPENINGS = {
    "announced": lambda manager, request: manager.on_new_request(request),
    "asked for a key": lambda manager, request: manager.lookup(b"a", request),
    "asked for keys": lambda manager, request: manager.lookup([b"a"], request),
    "is storing": lambda manager, request: manager.prepare_store([b"a"], request),
}


def stored(manager, keys, request):
    output = manager.prepare_store(keys, request)
    manager.complete_store(output.keys_to_store, request)
    return output.keys_to_store, output.store_spec.block_ids.tolist(), output.evicted_keys


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("kind", MANAGERS)
def test_older_request_stores_nothing(kind, opening):
    manager, old, new = MANAGERS[kind](), ReqContext("old"), ReqContext("new")
    OPENINGS[opening](manager, old)
    for _ in range(2):
        manager.reset_cache()
        assert stored(manager, [b"a", b"b"], old) == ([], [], [])
    assert manager.prepare_store([b"a"], new).keys_to_store == [b"a"]
    # The end of a store of before says nothing about the new request's.
    for success in (True, False):
        manager.complete_store([b"a"], old, success)
        assert manager.policy.get(b"a").is_ready is False
    manager.complete_store([b"a"], new)
    assert manager.lookup([b"a", b"b"], old) == 1
    assert manager.prepare_load([b"a"], old).block_ids.tolist() == [0]
    manager.complete_load([b"a"], old)
    assert stored(manager, [b"a", b"b"], old) == ([], [], [])
    with pytest.raises(ValueError, match="key"):
        manager.prepare_store([b"b", b""], old)
    manager.on_request_finished(old)
    # The context serves a request that begins now.
    assert stored(manager, [b"b"], old)[0] == [b"b"]


def test_request_of_a_draining_reset_stores():
    tier = ManualTier(8, np.zeros((8, 4), np.uint8))
    manager, old, new = TieredOffloadingManager(8, 8, [tier]), ReqContext("old"), ReqContext("new")
    stored(manager, [b"a"], old)
    manager.on_schedule_end()
    manager.reset_cache()
    # The tier still writes; an empty answer is final, and None means later.
    assert stored(manager, [b"b"], old) == ([], [], [])
    assert (manager.lookup([b"b"], new), manager.prepare_store([b"b"], new)) == (0, None)
    tier.end(tier.pending[0])
    manager.on_schedule_end()
    assert stored(manager, [b"b"], old) == ([], [], [])
    assert stored(manager, [b"b"], new)[0] == [b"b"]
