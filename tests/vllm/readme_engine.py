"""Run README's configuration under vLLM, with hits, promotions from its disk and evictions, and print what ran.

``python readme_engine.py MODEL CONFIG`` prints JSON: the imported modules, and the file and the first line of
each Python function that was called in any thread. The scheduler and the worker share this process.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from types import FrameType
from typing import Any

called: set[tuple[str, int]] = set()


def note(frame: FrameType, event: str, argument: object) -> None:
    if event == "call" and "kvcache" in frame.f_code.co_filename:
        called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


def run(model: str, config: dict[str, Any]) -> dict[str, int]:
    """Serve prompts, then again from the disk, and each once more from host memory; return counts."""
    from engine_options import OPTIONS
    from vllm import LLM, SamplingParams
    from waiting import wait_until

    llm = LLM(model, kv_transfer_config=config, **OPTIONS)
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.connector.connector_scheduler.manager
    params = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)

    def ask(tokens: list[int]) -> None:
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)

    def is_idle() -> bool:
        ask([3])
        return not manager.has_pending_work()

    for turn in range(2):
        for seed in range(7):
            tokens = random.Random(seed).choices(range(3, 512), k=650)
            for _ in range(1 + turn):
                ask(tokens)
                wait_until(is_idle)
                llm.reset_prefix_cache()
    llm.get_metrics()
    stats, [tier] = manager._manager.stats(), manager._tiered.tier_stats()
    core.shutdown()
    return {"loaded": stats.loaded_blocks, "evicted": stats.evicted_blocks, "promoted": tier.promoted_blocks}


def main() -> None:
    threading.setprofile(note)
    sys.setprofile(note)
    model, config = sys.argv[1:]
    # A general plugin of vLLM, ours, reads the command line.
    sys.argv[:] = ["vllm", "serve", model, "--kv-transfer-config", config]
    counts = run(model, json.loads(config))
    sys.setprofile(None)
    modules = [name for name in sys.modules if name.partition(".")[0] == "kvcache"]
    print(json.dumps({"counts": counts, "called": sorted(called), "modules": modules}))


if __name__ == "__main__":
    main()
