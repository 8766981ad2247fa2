"""Run an engine in processes of its own, as servers do, and print what two rounds of the same prompts gave.

Called by test_processes.py: ``python two_rounds.py SETTINGS``, a JSON object with the model, the batches of prompts,
the engine's options and the extra config.
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[1])
    transfer_config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings["extra_config"],
    }
    llm = LLM(settings["model"], kv_transfer_config=transfer_config, **settings["options"])
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    rounds = []
    for _ in range(2):
        outputs = []
        for batch in settings["batches"]:
            outputs += llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False)
        rounds.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
        llm.reset_prefix_cache()
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print("RESULT" + json.dumps({"rounds": rounds, "metrics": metrics}))


if __name__ == "__main__":
    main()
