"""Serve random batches of prompts until this process is killed; print the answer to each prompt.

Tests call `serve`, which runs ``python serve_until_killed.py SETTINGS``: a JSON object with the model, the prompts, a
seed and the extra config.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from typing import Any


def serve(settings: dict[str, Any], num_answers: int, wait_s: float) -> list[dict[str, Any]]:
    """Run an engine until it has given so many answers and a moment longer; kill it, and return all its answers."""
    from engine_options import OPTIONS, transfer_config

    options = OPTIONS | {"kv_transfer_config": transfer_config(settings["extra_config"])}
    answers: list[dict[str, Any]] = []
    with subprocess.Popen(
        [sys.executable, __file__, json.dumps(settings | {"options": options})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        said: list[str] = []
        listener = threading.Thread(target=lambda: said.extend(engine.stderr or ()), daemon=True)
        listener.start()
        killer = threading.Timer(wait_s, engine.kill)
        try:
            for line in engine.stdout:
                if line.startswith("ANSWER"):
                    answers.append(json.loads(line.removeprefix("ANSWER")))
                    if len(answers) == num_answers:
                        killer.start()
        finally:
            engine.kill()
    assert len(answers) >= num_answers, "".join(said)[-4000:]
    return answers


def main() -> None:
    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[1])
    prompts = settings["prompts"]
    llm = LLM(settings["model"], **settings["options"])
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    dice = random.Random(settings["seed"])
    while True:
        chosen = dice.sample(range(len(prompts)), dice.randrange(1, 4))
        outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in chosen], sampling, use_tqdm=False)
        for i, output in zip(chosen, outputs, strict=True):
            answer = {"prompt": i, "tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
            print("ANSWER" + json.dumps(answer), flush=True)
        # The next prompts must load from host memory or the disk.
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
