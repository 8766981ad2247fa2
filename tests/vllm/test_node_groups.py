"""gittins for models with several groups of KV caches in a node's pool, as vLLM's own scheduler calls it.

The engines' workers copy between dictionaries, and share that of host blocks: each block that a request reads is
checked.
"""

import os
import random
import shutil
import signal
import time

import cpu_worker_specs  # noqa: F401  (a loaded machine's owner may answer late)
import pytest
from scheduling import BLOCK_TOKENS, MAMBA, SimulatedSpec
from vllm.v1.request import RequestStatus

from kvcache.node.protocol import node_folder

SLIDING = (None, 4 * BLOCK_TOKENS)
STATES = (MAMBA, None, MAMBA)
MODELS = pytest.mark.parametrize("windows", [SLIDING, STATES], ids=["sliding", "states"])
pytestmark = pytest.mark.slow


class NodeSpec(SimulatedSpec):
    """A spec whose worker joins the pool, too."""

    def get_manager(self):
        self.worker_pool = self.worker_pool if hasattr(self, "worker_pool") else self.open_worker_pool()
        return super().get_manager()


def tokens(seed, num_blocks):
    return random.Random(seed).choices(range(3, 500), k=num_blocks * BLOCK_TOKENS)


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
        os.kill(figures(engine)["pid"], signal.SIGTERM)
    shutil.rmtree(node_folder(name))


def figures(engine):
    end_s = time.monotonic() + 60
    while (answer := engine.manager._manager.owner_figures()) is None:
        engine.manager.on_schedule_end()
        assert time.monotonic() < end_s
    return answer


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
    dice, num_failed = random.Random(7), 0
    for engine in engines:
        complete = engine.manager.complete_store
        engine.manager.complete_store = lambda keys, context, complete=complete: complete(
            keys, context, success=dice.random() > 0.1
        )
    stems = [tokens(stem, 8) for stem in range(3)]
    for number in range(160):
        engine = dice.choice(engines)
        prompt = dice.choice(stems)[: dice.randrange(130)] + tokens(1000 + number, dice.randrange(1, 4))
        engine.add(str(number), [*prompt, 2], max_tokens=dice.randrange(1, 30))
        for each in engines:
            each.step()
        if dice.random() < 0.3 and engine.scheduler.requests:
            engine.scheduler.finish_requests(
                dice.choice(sorted(engine.scheduler.requests)), RequestStatus.FINISHED_ABORTED
            )
        if number % 40 == 39:
            for each in engines:
                each.drain()
                assert each.scheduler.reset_prefix_cache(reset_connector=number == 119 and each is engine)
        if number == 79:
            os.kill(figures(engine)["pid"], signal.SIGKILL)
    for engine in engines:
        engine.drain()
        engine.step()
        num_failed += engine.stats.failed_blocks
    # A new owner keeps an engine's reservations until the engine greets it. Then the engine offers refused blocks
    # again, and these stores take some steps.
    end_s = time.monotonic() + 60
    while any(figures(engine)[name] for engine in engines for name in ("num_pending", "num_referenced")):
        assert time.monotonic() < end_s, [figures(engine) for engine in engines]
        for engine in engines:
            engine.step()
    assert min(num_failed, *(engine.loaded_positions for engine in engines)) > 0


def test_large_batch_stores_its_head(make):
    # An engine may hold half of the pool: 12 blocks, which are six positions of both groups.
    engine = make(SLIDING, 24, cache_policy="lru", step_tokens=256, retention_interval=None)
    assert [serve(engine, tokens(seed, 16)) for seed in (0, 0, 1, 1)] == [0, 6, 0, 6]


def test_other_windows_are_refused(make):
    make(SLIDING, 60)
    with pytest.raises(ValueError, match=r"group_windows: the pool has \[None, 4\], this engine \[None, 2\]"):
        make(SLIDING, 60, group_windows=[None, 2])
