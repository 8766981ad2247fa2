"""A real vLLM engine on the CPU, with small random models; skipped where vLLM is not installed."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import find_valkey, running_valkey

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

# In-process, so that counters and host memory can be looked at. The number of threads decides how sums are rounded,
# hence the tokens; so it is the same in every engine that is compared.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

# The engine imports a spec of the tests by its name; `consumers` has what routers accept, `stores` has servers,
# `test_limits` the numbers.
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("vllm", "exporters", "project", "tiers")]

VOCABULARY = 512


@pytest.fixture(scope="session")
def tokens() -> Callable[[int, int], list[int]]:
    """A function from a seed and a count to random token ids."""
    return lambda seed, count: random.Random(seed).choices(range(3, VOCABULARY), k=count)


class Engine:
    """One booted engine and a look inside."""

    def __init__(self, model: Path, extra_config: dict[str, Any] | None, **options: Any) -> None:
        from engine_options import OPTIONS, transfer_config
        from vllm import LLM

        if extra_config is not None:
            options["kv_transfer_config"] = transfer_config(extra_config)
        self.llm = LLM(str(model), **{**OPTIONS, **options})

    def generate(
        self, prompts: list[list[int]], params: dict[str, Any] | None = None, max_tokens: int = 8
    ) -> list[Any]:
        """Return vLLM's outputs of greedy generation."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    def ask(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Return the tokens generated for each prompt, and how many of each prompt's were not computed."""
        outputs = self.generate(prompts)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return tokens, [output.num_cached_tokens for output in outputs]

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the tokens generated for each prompt."""
        return self.ask(prompts)[0]

    def ask_each(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Send one prompt after another, wait for the tiers, and return the results of `ask`."""
        from engine_tiering import settle

        answers = []
        for prompt in prompts:
            answers.append(self.ask([prompt]))
            settle(self.manager)
        return [tokens[0] for tokens, _ in answers], [cached[0] for _, cached in answers]

    def drop_device_cache(self, host_too: bool = False) -> None:
        """Drop the engine's own prefix cache, and the host's blocks with `host_too`."""
        assert self.llm.reset_prefix_cache(reset_connector=host_too)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        """Our adapter on the scheduler's side."""
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def stats(self) -> Any:
        """Our manager's counters."""
        return self.manager._manager.stats()

    @property
    def worker(self) -> Any:
        """Our adapter on the worker's side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker

    def metric(self, name: str) -> float:
        """Return what the engine exports under `name`, over all labels."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def boot() -> Callable[..., contextlib.AbstractContextManager[Engine]]:
    """A context manager that boots an engine, ``boot(model, extra_config, **engine_options)``."""

    @contextlib.contextmanager
    def booted(model: Path, extra_config: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
        try:
            engine = Engine(model, extra_config, **options)
        except BaseException:
            # vLLM keeps a worker's connector and its groups for the whole process; the next engine may need others.
            from vllm.distributed import cleanup_dist_env_and_memory
            from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise
        try:
            yield engine
        finally:
            engine.close()

    return booted


@pytest.fixture
def valkey_url() -> Iterator[str]:
    """The address of a server that runs for one test."""
    pytest.importorskip("valkey")
    if find_valkey() is None:
        pytest.skip("needs valkey-server or redis-server")
    with running_valkey() as port:
        yield f"valkey://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models: weights so large that greedy tokens depend on the whole context.

    ``llama`` is small; ``tall`` computes enough per byte of KV cache to time; ``hybrid`` has two groups with sliding
    windows and one without, which share tensors.
    """
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    configs = {
        "llama": LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, **heads, **common),
        "tall": LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, **heads, **common),
        "hybrid": Gemma3TextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=256,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            **common,
        ),
    }
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: folder / name for name in configs}


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that makes vLLM's scheduler over our spec without a model; it is shut down at the end."""
    from scheduling import ModelFreeEngine, write_config

    engines = []

    def make(*args: Any, **options: Any) -> Any:
        engines.append(ModelFreeEngine(write_config(tmp_path), *args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.shutdown()


@pytest.fixture(scope="session")
def prompts(tokens: Any) -> list[list[int]]:
    """Three prompts of 1,040 tokens; 1,000 are shared, so their 32 whole blocks each are 34 different ones."""
    return [tokens(0, 1000) + tokens(seed, 40) for seed in (1, 2, 3)]


@pytest.fixture(scope="session")
def crowd(tokens: Any) -> list[list[int]]:
    """Seven unrelated prompts of 20 whole blocks each, and a bit; more than the device holds."""
    return [tokens(seed, 650) for seed in range(10, 17)]


@pytest.fixture(scope="session")
def storm(tokens: Any) -> list[list[int]]:
    """24 prompts of 40 to 440 tokens that leave one of three common stems at any token."""
    dice = random.Random(0)
    stems = [tokens(seed, 400) for seed in (20, 21, 22)]
    return [dice.choice(stems)[: dice.randrange(400)] + tokens(seed, 40) for seed in range(30, 54)]


@pytest.fixture(scope="session")
def expected(boot: Any, models: Any, prompts: Any, crowd: Any, storm: Any) -> Any:
    """What the engine answers without offloading: a function of the prompts."""
    asked = [*prompts, *crowd, *storm]
    with boot(models["llama"], None) as engine:
        known = dict(zip(map(tuple, asked), engine.answers(asked), strict=True))
    assert len({tuple(answer) for answer in known.values()}) == len(known)
    return lambda asked: [known[tuple(prompt)] for prompt in asked]
