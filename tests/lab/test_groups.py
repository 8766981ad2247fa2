"""Plans of models with several KV-cache groups: the table of hybrid models, and groups of a config.json."""

import json

import pytest

from kvcache.assembly.models import model_of
from kvcache.lab.simulate.cells import OPTIMUM, Job, Plan, run_job
from kvcache.lab.simulate.groups import parse_groups
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.trace import Trace

FILES = {"conversation": "mooncake_conversation.jsonl", "agents": "agentic_coding.jsonl.gz"}
# Trace, groups, slots of all groups, hits of lru, hits of gittins and the keys it stores (None: not in the table).
TABLE = [
    ("conversation", "full,swa:1", 2000, 15016, 27071, 153426),
    ("conversation", "full" + ",swa:2" * 5, 6000, 25646, 39387, 279982),
    ("conversation", "full" + ",swa:2" * 5 + ",retention=null", 6000, 12990, 39452, None),
    ("conversation", "full,mamba,mamba,mamba", 12000, 60173, 63579, 240732),
    ("conversation", "full,swa:1,mamba", 3000, 17234, 32789, 158841),
    ("agents", "full,swa:1", 2000, 884091, 986008, 251620),
    ("agents", "full,swa:1,retention=null", 1000, 293559, 644940, None),
]


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.slow] * (i > 0)) for i, row in enumerate(TABLE)])
def test_plan_reproduces_table_of_hybrid_models(shared, row):
    name, groups, num_blocks, lru_hits, hits, stored = row
    with Trace(shared / "traces" / FILES[name]) as requests:
        trace = CompactTrace.of(requests, requests.block_size)
    lru, gittins = (
        run_job(trace, Job(name, num_blocks), Plan(groups=parse_groups(groups))) for name in ("lru", "gittins")
    )

    assert (lru.hit_blocks, gittins.hit_blocks) == (lru_hits, hits)
    assert stored in (None, gittins.stored_blocks)


# The same above a tier of so many slots: hits and blocks read from the tier.
TABLE_ABOVE_TIER = [
    ("conversation", "full,swa:1", 2000, 4000, (23045, 8283), (36062, 8492)),
    ("agents", "full,swa:1", 1000, 2000, (866667, 402005), (960414, 361957)),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_ABOVE_TIER)
def test_plan_above_tier_reproduces_table(shared, row):
    name, groups, num_blocks, tier_blocks, *expected = row
    with Trace(shared / "traces" / FILES[name]) as requests:
        trace = CompactTrace.of(requests, requests.block_size)
    plan = Plan(groups=parse_groups(groups))
    cells = [run_job(trace, Job(policy, num_blocks, (tier_blocks,)), plan) for policy in ("lru", "gittins")]

    assert [(cell.hit_blocks, cell.serving["media"][1]["hit_blocks"]) for cell in cells] == expected


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_plan_of_groups_reads_tier(write_trace, policy):
    prompts = [[10 * i + j for j in range(4)] for i in range(6)]
    with Trace(write_trace([*prompts, *prompts], step_ms=1000)) as requests:
        trace = CompactTrace.of(requests, requests.block_size)
    plan = Plan(groups=parse_groups("full,swa:1,mamba"))
    alone, above = (run_job(trace, Job(policy, 8, tiers), plan) for tiers in ((), (100,)))
    # Three blocks of a prompt hit: the last token is computed again. A hit loads three blocks, a window and a state.
    assert (alone.hit_blocks, above.hit_blocks) == (0 if policy == "lru" else 3, 18)
    assert [medium["hit_blocks"] for medium in above.serving["media"]] == [0, 30]


SHAPE = {"num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
GPT_OSS = SHAPE | {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}
GEMMA = SHAPE | {"model_type": "gemma3_text", "sliding_window": 1024}
LINEAR = {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
LINEAR |= {"linear_num_key_heads": 16, "linear_conv_kernel_dim": 4, "head_dim": 64}
QWEN = SHAPE | LINEAR | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6}
MAMBA = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
NEMOTRON = SHAPE | MAMBA | {"hybrid_override_pattern": "M-M-M*-M-M-M*-", "mamba_ssm_cache_dtype": "float32"}
BAMBA = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4}
NO_KINDS = "must name its layers' kinds in one of layer_types, layers_block_type"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Windows at blocks of 512 tokens; KiB of a slot, which holds a block or, if that is larger, a state.
        (GPT_OSS, ((None, 1), 12 * 2048)),
        (GEMMA, ((None, 2, 2, 2, 2, 2), 4 * 2048)),
        ({"text_config": GEMMA | {"sliding_window_pattern": 4}}, ((None, 2, 2, 2), 6 * 2048)),
        (QWEN, ((None, 1, 1, 1), 6 * (1024 + 48))),
        (NEMOTRON, ((None, 1, 1, 1), 2 * (4096 + 60))),
        (SHAPE | BAMBA | {"attn_layer_indices": range(3, 24, 4)}, ((None, 1, 1, 1), 6 * (4096 + 51))),
        (GPT_OSS | {"sliding_window": None}, "'sliding_window' must be an int >= 1, got None"),
        (GPT_OSS | {"layer_types": ["chunked_attention"]}, "'layer_types' names a layer 'chunked_attention'; a plan"),
        (GPT_OSS | {"layer_types": ["full_attention"]}, "at least one other, got full in 'layer_types'"),
        (QWEN | {"linear_key_head_dim": 0}, "'linear_key_head_dim' must be an int >= 1, got 0"),
        (SHAPE, NO_KINDS),
    ],
)
def test_config_gives_groups_or_names_field(tmp_path, config, expected):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config, default=list))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"(?s)model config .*config.json.*{expected}"):
            parse_groups(str(path))
    else:
        groups = parse_groups(str(path))
        assert (groups.at(512).windows, groups.slot_bytes(model_of(str(path)), 512)) == (expected[0], expected[1] << 10)


def test_plan_of_groups_reports_times(run_json, run, write_trace, tmp_path):
    trace = write_trace([[0, 1, 2], [3, 4, 5], [0, 1, 2, 6], [0, 1, 2, 6, 7]], step_ms=1000)
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | {"hidden_size": 4096, "intermediate_size": 2880}))
    argv = ("plan", trace, "--groups", tmp_path, "--memory", "144MiB,1GiB", "--jobs", 1)
    document = run_json(*argv, "--checkpoint", tmp_path / "cells")
    # The first prompt's window is at its second block: the engine always computes the last token.
    assert [(cell["num_blocks"], cell["hit_blocks"]) for cell in document["cells"]] == [(6, 3), (42, 5)]
    assert document["groups"]["windows"] == [None, 1]
    assert document["unbounded"]["hit_blocks"] == 5
    serving = document["cells"][1]["serving"]
    assert serving["media"][0]["read_bytes"] == 7 * document["block_bytes"] == 7 * 12 * 2048 * 1024
    assert serving["ttft_p50_s"] > 0
    out = run(*argv)[1]
    assert (
        "KV-cache groups full,swa:1, windows in blocks, sparse windowed blocks offered; capacities count slots" in out
    )
    assert "counted in full" not in out
    argv = ("plan", trace, "--groups", f"{tmp_path},retention=null", "--checkpoint", tmp_path / "cells", "--jobs", 1)
    assert "is of another groups: name another file" in run(*argv)[2]


def test_cache_without_limit_holds_all_groups(write_trace):
    with Trace(write_trace([[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]])) as requests:
        trace = CompactTrace.of(requests, requests.block_size)
    cell = run_job(trace, Job(OPTIMUM, None), Plan(groups=parse_groups("full,swa:2,mamba")))
    assert (cell.policy, cell.num_blocks, cell.blocks, cell.hit_blocks) == (OPTIMUM, None, 15, 7)
