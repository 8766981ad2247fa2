"""Blocks of another format: a directory of one dtype or order of values is refused by an engine of another one."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3NextConfig
from vllm.v1.attention.backends import cpu_attn

from kvcache.tiers.disk.maintenance import inspect_tier

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
STATES = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 4,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
# Of an engine without drafts, in one dtype: it keeps the names and directories of the first kvcache that had tiers.
FIELDS = {
    "engine", "device", "quantization", "compute_dtype", "sliding_window", "multimodal", "config", "weights", "lora",
    "kv_skip_layers", "dtype", "layout", "groups", "blocks_per_chunk", "tokens_per_hash", "bytes_per_block", "parallel",
}  # fmt: skip


@pytest.fixture
def open_engine(boot, tmp_path):
    """A function that boots an engine over a directory, with random weights of a seed."""

    def open_one(config, **options):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "32MiB"}
        options = {"load_format": "dummy", "enable_prefix_caching": True, **options}
        return boot(folder, {"cpu_bytes_to_use": 64 << 20, "tiers": [tier]}, **options)

    return open_one


def llama(num_layers=2):
    return LlamaConfig(num_hidden_layers=num_layers, architectures=["LlamaForCausalLM"], **SIZES)


def test_plain_engine_keeps_its_fields(open_engine, tmp_path):
    with open_engine(llama()):
        assert inspect_tier(tmp_path / "kv").fingerprint.keys() == FIELDS


def test_other_packing_is_refused(open_engine, monkeypatch):
    with open_engine(llama(), dtype="bfloat16"):
        kind = cpu_attn._get_attn_isa(torch.bfloat16, 32, 32)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec" if kind == "amx" else "amx")
    with pytest.raises(ValueError, match="packing"), open_engine(llama(), dtype="bfloat16"):
        pass


def test_other_state_dtype_is_refused(open_engine):
    config = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], **SIZES, **STATES)
    # Named, because "auto" depends on the CPU: a state of 4 bytes would change the size of a block, too.
    options = {"dtype": "bfloat16", "block_size": None, "mamba_ssm_cache_dtype": "bfloat16"}
    with open_engine(config, **options):
        pass
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        with pytest.raises(ValueError, match="dtypes"), open_engine(config, **{**options, name: "float16"}):
            pass
    with open_engine(config, **options):
        pass


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafting_engine_keeps_its_blocks(open_engine, tokens, tmp_path, method):
    draft = llama(1)
    if method == "eagle3":
        draft.update({"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    draft.save_pretrained(tmp_path / "draft")
    speculative = {"method": method, "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    # vLLM 0.33 leaves out the last block of a draft.
    for num_loaded in ([0], [608, 640]):
        with open_engine(llama(4), speculative_config=speculative) as engine:
            assert engine.ask_each([tokens(0, 641)])[1][0] in num_loaded
