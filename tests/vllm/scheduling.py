"""vLLM's own scheduler and connector over our spec, without a model: a worker of dictionaries.

Every device block and every host block holds the hash that its tokens have, so that a block that lands in the wrong
place, or is read before it was written, shows at once. Each also knows which weights its bytes depend on. Time is
simulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_options import transfer_config
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcache.integrations.vllm import KVCacheOffloadingSpec

BLOCK_TOKENS = 16
GENERATED_TOKEN = 1
MAMBA = "mamba"
SLIDING = (None, 4 * BLOCK_TOKENS)
STATES = (MAMBA, None, MAMBA)
"""Windows of a model's groups of KV caches: a sliding window of four blocks, or recurrent states."""


def tokens(seed: int, num_blocks: int) -> list[int]:
    """Return random token ids that fill blocks."""
    return random.Random(seed).choices(range(3, 500), k=num_blocks * BLOCK_TOKENS)


def storm(
    engines: Sequence[Any], num_requests: int, stem_blocks: int, reset_at: int, dice: random.Random
) -> Iterator[tuple[int, Any]]:
    """Serve prompts that leave one of three stems at any token, each on one of the engines.

    Requests are aborted, a tenth of the stores fails, and all caches of a device are reset. Request `reset_at` resets
    its engine's host memory, too. Yields number and engine of each request after a step of all engines.
    """
    for engine in engines:
        complete = engine.manager.complete_store
        engine.manager.complete_store = lambda keys, context, complete=complete: complete(
            keys, context, success=dice.random() > 0.1
        )
    stems = [tokens(stem, stem_blocks) for stem in range(3)]
    for number in range(num_requests):
        engine = dice.choice(engines)
        prompt = dice.choice(stems)[: dice.randrange(16 * stem_blocks)] + tokens(1000 + number, dice.randrange(1, 4))
        engine.add(str(number), [*prompt, 2], max_tokens=dice.randrange(1, 30))
        for each in engines:
            each.step()
        if dice.random() < 0.3 and engine.scheduler.requests:
            aborted = dice.choice(sorted(engine.scheduler.requests))
            engine.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        if number % 40 == 39:
            for each in engines:
                each.drain()
                assert each.scheduler.reset_prefix_cache(reset_connector=number == reset_at and each is engine)
        yield number, engine
    for each in engines:
        each.drain()


def write_config(folder: Path) -> Path:
    """Write the config of a small model without weights, and return the folder."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=1 << 20,
        architectures=["LlamaForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(folder)
    return folder


CLOCK = SimpleNamespace(now_s=0.0)
"""Simulated seconds."""


class SimulatedSpec(KVCacheOffloadingSpec):
    """Our spec, whose manager reads the simulated clock."""

    def clock(self) -> float:
        return float(CLOCK.now_s)


class ModelFreeEngine:
    """Schedule requests over our spec, whose options are in `extra_config`.

    Of the `model` in a folder, only the config is read. Blocks have 16 tokens. A step takes `step_s` and schedules at
    most `step_tokens` tokens, so longer prompts are computed in chunks; a transfer takes `transfer_steps`. `windows`
    has each KV-cache group's sliding window in tokens, MAMBA for recurrent layers, or None for full attention. Windows
    are kept every `retention_interval` tokens; 0: where prompts end and part; None: all.
    """

    def __init__(
        self,
        model: Path,
        num_device_blocks: int,
        num_host_blocks: int,
        step_tokens: int = 256,
        step_s: float = 0.1,
        transfer_steps: int = 1,
        windows: Iterable[int | str | None] = (None,),
        has_device_cache: bool = True,
        max_num_seqs: int = 64,
        max_model_len: int = 1 << 20,
        retention_interval: int | None = 0,
        **extra_config: Any,
    ) -> None:
        windows = tuple(windows)
        page_bytes = 2 * BLOCK_TOKENS * 4  # keys and values of one head of one float
        groups = [KVCacheGroupSpec([f"layer{i}"], _group_spec(window)) for i, window in enumerate(windows)]
        config = KVCacheConfig(
            num_blocks=num_device_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=page_bytes * num_device_blocks,
                    layers=[f"layer{i}" for i in range(len(windows))],
                    layer_stride=0,
                    block_stride=page_bytes,
                )
            ],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=retention_interval,
        )
        spec = {"spec_name": "SimulatedSpec", "spec_module_path": "scheduling"}
        self.vllm_config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=num_device_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=has_device_cache,
            prefix_cache_retention_interval=retention_interval,
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config=transfer_config(
                spec | {"cpu_bytes_to_use": num_host_blocks * page_bytes} | extra_config
            ),
        ).create_engine_config()
        self.vllm_config.cache_config.num_gpu_blocks = num_device_blocks
        if MAMBA in windows:
            self.vllm_config.cache_config.mamba_cache_mode = "align"
        with set_current_vllm_config(self.vllm_config):
            self.scheduler = Scheduler(
                vllm_config=self.vllm_config,
                kv_cache_config=config,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                block_size=BLOCK_TOKENS,
                log_stats=False,
            )
        init_none_hash(sha256)
        self._block_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._windows = windows
        self._step_s = step_s
        self._transfer_steps = transfer_steps
        self._num_steps = 0
        self._device: dict[tuple[int, int], Any] = {}
        self._host: dict[tuple[int, int], Any] = {}
        self._chunk_blocks = extra_config.get("blocks_per_chunk", 1)
        # Number of the weights, which an update raises, and those on which each block of the device depends.
        self.weights = 0
        self._ages: dict[tuple[int, int], set[int]] = {}
        # Step of the end, job and request (of a load) of each running transfer.
        self._transfers: list[tuple[int, int, str | None]] = []
        self._pending_stores: dict[int, Any] = {}
        self.loaded_blocks = 0
        # Of the first group without a window.
        self.loaded_positions = 0
        self.num_preemptions = 0
        CLOCK.now_s = 0.0

    @property
    def manager(self) -> Any:
        """Our adapter."""
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def stats(self) -> Any:
        """Our manager's counters."""
        return self.manager._manager.stats()

    def add(self, req_id: str, token_ids: list[int], max_tokens: int = 1) -> None:
        """Hand a request to the scheduler."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        self.scheduler.add_request(
            Request(
                request_id=req_id,
                prompt_token_ids=token_ids,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=CLOCK.now_s,
                block_hasher=self._block_hasher,
            )
        )

    def serve(self, arrivals: Iterator[tuple[float, list[int]]], max_tokens: int = 1) -> None:
        """Serve requests that arrive at the given seconds, in that order, and drain."""
        coming = next(arrivals, None)
        number = 0
        while (is_busy := self.scheduler.requests or self._transfers or self._pending_stores) or coming is not None:
            if not is_busy and coming is not None:
                CLOCK.now_s = max(CLOCK.now_s, coming[0])
            while coming is not None and coming[0] <= CLOCK.now_s:
                self.add(str(number), coming[1], max_tokens)
                number += 1
                coming = next(arrivals, None)
            self.step()

    def serve_alone(self, token_ids: list[int]) -> int:
        """Serve one prompt with an empty device cache, and return how many of its positions were loaded."""
        self.scheduler.reset_prefix_cache()
        before = self.loaded_positions
        self.add(f"request-{random.random()}", [*token_ids, 2])
        self.drain()
        return self.loaded_positions - before

    def drain(self) -> None:
        """Step until nothing is left to do."""
        self.serve(iter(()))

    def forget_host(self) -> None:
        """Drop the contents of the host's blocks, so that reading one raises."""
        self._host.clear()

    def step(self) -> Any:
        """Take one step of scheduler and worker, and return the scheduler's output."""
        self._num_steps += 1
        CLOCK.now_s += self._step_s
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.num_preemptions += len(output.preempted_req_ids or ())
        flushed = set(metadata.jobs_to_flush or ())
        # Stores of the step before are submitted now, in front of the loads, as the connector's worker does it.
        self._submit_stores()
        for job_id, job in metadata.load_jobs.items():
            self._load(job.src_spec, job.dst_spec)
            self._transfers.append((self._num_steps + self._transfer_steps, job_id, job.req_id))
        self._compute(output)
        self._pending_stores = dict(metadata.store_jobs)
        if not output.total_num_scheduled_tokens:
            self._submit_stores()
        self.scheduler.update_from_output(output, self._runner_output(output, flushed))
        return output

    def _submit_stores(self) -> None:
        for job_id, job in self._pending_stores.items():
            self._store(job.src_spec, job.dst_spec)
            self._transfers.append((self._num_steps + self._transfer_steps, job_id, None))
        self._pending_stores = {}

    def _compute(self, output: Any) -> None:
        """Check what the scheduled requests build on, and write the blocks that they complete."""
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            end = request.num_computed_tokens
            start = end - num_tokens
            tables = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            self._age(tables, start, end)
            for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
                first, first_written = 0, start // BLOCK_TOKENS
                if window == MAMBA:
                    # The state at the end of a block, if the step begins or ends there.
                    first = (start - 1) // BLOCK_TOKENS
                    first_written = (end - 1) // BLOCK_TOKENS
                elif window is not None:
                    first = max(0, start - window + 1) // BLOCK_TOKENS
                for i in range(max(first, 0), start // BLOCK_TOKENS):
                    found = self._device.get((group, table[i]))
                    if found != request.block_hashes[i]:
                        raise AssertionError(f"request {req_id}: block {i} of group {group} holds {found!r}")
                for i in range(first_written, end // BLOCK_TOKENS):
                    self._device[group, table[i]] = request.block_hashes[i]

    def _age(self, tables: Any, start: int, end: int) -> None:
        """Note on which weights the blocks of a step depend: the present ones, and those of all blocks it reads."""
        weights = {self.weights}
        for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
            first = 0 if window is None else max(0, start - (1 if window == MAMBA else window - 1)) // BLOCK_TOKENS
            for block_id in table[first : -(-start // BLOCK_TOKENS)]:
                weights |= self._ages.get((group, block_id), set()) if block_id else set()
        for group, table in enumerate(tables):
            for block_id in table[start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]:
                self._ages[group, block_id] = weights

    def _store(self, device: Any, host: Any) -> None:
        for group, block_id, host_id in self._pairs(device, host):
            self._host[host_id] = (group, self._device[group, block_id], self._ages[group, block_id])

    def _load(self, host: Any, device: Any) -> None:
        for group, block_id, host_id in self._pairs(device, host):
            stored_group, content, weights = self._host[host_id]
            if weights != {self.weights}:
                raise AssertionError(f"host block {host_id} is of weights {weights}, not {self.weights}")
            if stored_group != group:
                raise AssertionError(f"host block {host_id} is of group {stored_group}, not {group}")
            self._device[group, block_id], self._ages[group, block_id] = content, weights
            self.loaded_blocks += 1
            self.loaded_positions += group == self._windows.index(None)

    def _pairs(self, device: Any, host: Any) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield (group, device block, host block and place in it) of a transfer."""
        num_parts, block_ids, host_ids = self._chunk_blocks, iter(device.block_ids.tolist()), host.block_ids.tolist()
        if num_parts == 1:
            groups = [group for group, size in enumerate(device.group_sizes) for _ in range(size)]
            yield from zip(groups, block_ids, [(host_id, 0) for host_id in host_ids], strict=True)
            return
        # Without windows, the blocks of a transfer follow each other in the prompt.
        (size,), (first,) = device.group_sizes, device.block_indices
        for place, block_id in zip(range(first, first + size), block_ids, strict=True):
            yield 0, block_id, (host_ids[place // num_parts - first // num_parts], place % num_parts)

    def _runner_output(self, output: Any, flushed: set[int]) -> ModelRunnerOutput:
        req_ids = list(output.num_scheduled_tokens)
        sampled = []
        for req_id in req_ids:
            request = self.scheduler.requests[req_id]
            is_prefilled = request.num_computed_tokens >= request.num_tokens
            sampled.append([GENERATED_TOKEN] if is_prefilled else [])
        worker_meta, received = OffloadingWorkerMetadata(), set()
        running, self._transfers = sorted(self._transfers, key=itemgetter(0, 1)), []
        for step, job_id, req_id in running:
            if step > self._num_steps and job_id not in flushed:
                self._transfers.append((step, job_id, req_id))
                continue
            worker_meta.mark_completed(job_id)
            if req_id is not None:
                received.add(req_id)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=worker_meta),
        )


def _group_spec(window: int | str | None) -> Any:
    if window == MAMBA:
        return MambaSpec(
            block_size=BLOCK_TOKENS, shapes=((2 * BLOCK_TOKENS,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
