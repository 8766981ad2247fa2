"""The transformers door over further architectures: each keeps its keys and values in a way of its own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvcache.integrations.transformers import PrefixCache

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "attention in chunks": ("llama4_text", {"attention_chunk_size": 24, "head_dim": 16, "intermediate_size_mlp": 96}),
    "attention sinks": ("gpt_oss", {"head_dim": 16, "sliding_window": 24, **EXPERTS}),
    "alibi": ("bloom", {"n_layer": 3, "n_head": 4}),
    "shared layers": ("gemma4_text", {"num_kv_shared_layers": 2, "sliding_window": 24}),
    "compressed": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
}


def draw(length, seed):
    return torch.randint(2, 199, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", MODELS)
def test_turns_and_padded_batches_give_the_tokens_of_the_model_alone(case):
    model_type, more = MODELS[case]
    if case == "shared layers":
        more = more | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **more})).eval()
    cache = PrefixCache(model, num_blocks=64)
    kwargs = {"max_new_tokens": 6, "do_sample": False}
    ids = draw(40, seed=1)
    for turn in range(3):
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
        assert torch.equal(cache.generate(ids, **kwargs), expected)
        ids = torch.cat([expected, draw(9, seed=turn)], dim=1)
    # 45 and 60 tokens had keys and values when the second and the third turn began.
    # The last block of each hit was computed again.
    assert cache.stats().loaded_tokens == 16 + 32
    batch, mask = torch.zeros(2, 70, dtype=torch.long), torch.ones(2, 70, dtype=torch.long)
    batch[0], batch[1, 17:], mask[1, :17] = draw(70, seed=2), draw(70, seed=2)[0, :53], 0
    for _ in range(2):
        expected = model.generate(batch, attention_mask=mask, **kwargs)
        assert torch.equal(cache.generate(batch, mask, **kwargs), expected)
    # Rows begin at columns 0 and 17, and end whole blocks at 64 and 65.
    assert cache.load(batch, mask)[1] == 64
