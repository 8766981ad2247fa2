"""gittins for models with several groups of KV caches in a node's pool, as vLLM's own scheduler calls it.

The engines' workers copy between dictionaries, and share that of host blocks: each block that a request reads is
checked.
"""

import os
import random
import shutil
import signal

import cpu_worker_specs  # noqa: F401  (a loaded machine's owner may answer late)
import pytest
from scheduling import BLOCK_TOKENS, MAMBA, SLIDING, STATES, SimulatedSpec, storm, tokens
from waiting import kill_and_wait, wait_until

from kvcache.node.protocol import node_folder

MODELS = pytest.mark.parametrize("windows", [SLIDING, STATES], ids=["sliding", "states"])
pytestmark = pytest.mark.slow


class NodeSpec(SimulatedSpec):
    """A spec whose worker joins the pool, too."""

    def get_manager(self):
        self.worker_pool = self.worker_pool if hasattr(self, "worker_pool") else self.open_worker_pool()
        return super().get_manager()


@pytest.fixture
def make(make_engine, tmp_path):
    """A function that makes an engine; all that name a pool share one."""
    name, engines = f"test-{tmp_path.name}-{os.getpid()}", []

    def build(windows, num_host_blocks, is_shared=True, **options):
        options = {"step_tokens": 4 * BLOCK_TOKENS, "max_model_len": 4096, **options}
        if is_shared:
            options |= {"spec_name": "NodeSpec", "spec_module_path": __name__, "node_pool": name}
            # Blocks that processes share are whole pages.
            options["cpu_bytes_to_use"] = num_host_blocks * 4096
        engine = make_engine(400, num_host_blocks, windows=windows, **options)
        if is_shared:
            engines.append(engine)
            engine._host = engines[0]._host
        return engine

    yield build
    for engine in engines[:1]:
        kill_and_wait(figures(engine)["pid"], signal.SIGTERM)
    shutil.rmtree(node_folder(name))


def figures(engine):
    return wait_until(lambda: engine.manager.on_schedule_end() or engine.manager._manager.owner_figures())


def serve(engine, prompt):
    """Serve a prompt with an empty device cache. Return how many of its positions were loaded."""
    num_loaded = engine.serve_alone(prompt)
    if hasattr(engine.manager, "_node"):
        figures(engine)
    return num_loaded


@MODELS
def test_two_engines_hit_as_one(make, windows):
    own = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": "kvcache.integrations.vllm"}
    alone = make(windows, 120, is_shared=False, **own)
    engines = [make(windows, 120), make(windows, 120)]
    assert engines[0].manager._manager.path_group == windows.index(None)
    stems = [tokens(seed, 10) for seed in range(4)]
    dice, hits = random.Random(1), []
    for number in range(60):
        stem = dice.randrange(4)
        stems[stem] = stems[stem][: 12 * BLOCK_TOKENS] + tokens(100 + number, 2)
        hits.append([serve(engine, stems[stem]) for engine in (alone, engines[number % 2])])
    assert [one for one, _ in hits] == [other for _, other in hits]
    assert sum(one for one, _ in hits) > 200
    assert figures(engines[0])["loaded_blocks"] == alone.stats.loaded_blocks
    assert figures(engines[0])["stored_blocks"] == alone.stats.stored_blocks


@pytest.mark.parametrize("windows", [SLIDING, STATES, (3 * BLOCK_TOKENS, None, MAMBA)])
def test_storm_over_one_pool_keeps_content(make, windows):
    """Requests are aborted, stores fail, an engine resets its cache, and the owner is killed."""
    engines = [make(windows, 60, transfer_steps=3) for _ in range(2)]
    for number, engine in storm(engines, 160, 8, 119, random.Random(7)):
        if number == 79:
            os.kill(figures(engine)["pid"], signal.SIGKILL)
    for engine in engines:
        engine.step()
    num_failed = sum(engine.stats.failed_blocks for engine in engines)

    # A new owner keeps an engine's reservations until the engine greets it. Then the engine offers refused blocks
    # again, and these stores take some steps.
    def is_idle():
        for engine in engines:
            engine.step()
        return not any(figures(engine)[name] for engine in engines for name in ("num_pending", "num_referenced"))

    wait_until(is_idle)
    assert min(num_failed, *(engine.loaded_positions for engine in engines)) > 0


def test_large_batch_stores_its_head(make):
    # An engine may hold half of the pool: 12 blocks, which are six positions of both groups.
    engine = make(SLIDING, 24, cache_policy="lru", step_tokens=256, retention_interval=None)
    assert [serve(engine, tokens(seed, 16)) for seed in (0, 0, 1, 1)] == [0, 6, 0, 6]


def test_other_windows_are_refused(make):
    make(SLIDING, 60)
    with pytest.raises(ValueError, match=r"group_windows: the pool has \[None, 4\], this engine \[None, 2\]"):
        make(SLIDING, 60, group_windows=[None, 2])
