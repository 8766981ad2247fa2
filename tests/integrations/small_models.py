"""Small random models of many architectures, prompts for them, and their answers with and without a prefix cache."""

import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that the next token depends on the whole context, not on the last token alone.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24, "head_dim": 16, "num_hidden_layers": 4, "layer_types": WINDOWS},
    "gpt2": {},
    # Attention in chunks, attention sinks, alibi, shared layers, and compressed keys and values.
    "llama4_text": {"attention_chunk_size": 24, "head_dim": 16, "intermediate_size_mlp": 96, "num_hidden_layers": 4},
    "gpt_oss": {"head_dim": 16, "sliding_window": 24, **EXPERTS},
    "bloom": {},
    "gemma4_text": {
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": WINDOWS,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 199,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
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
}


def built(kind="llama", seed=0, dtype=torch.float32, **changes):
    """Return a new model."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {}), **changes})
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


model_of = functools.cache(built)


def prompt_of(length, seed=0):
    """Return random token ids of one prompt."""
    return torch.randint(2, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(seed))


def padded(*lengths):
    """Return ids and mask of prompts that begin alike, padded on the left."""
    columns = max(lengths)
    ids, mask = torch.zeros((len(lengths), columns), dtype=torch.long), torch.zeros(len(lengths), columns).long()
    for row, length in enumerate(lengths):
        ids[row, columns - length :] = prompt_of(columns)[0, :length]
        mask[row, columns - length :] = 1
    return ids, mask


def plain(model, ids, mask=None, new=6, **options):
    """Return the greedy tokens of the model alone."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


def cached(cache, ids, mask=None, new=6, **options):
    """Return the greedy tokens of a prefix cache."""
    return cache.generate(ids, mask, max_new_tokens=new, do_sample=False, **options)


def check_answer(cache, ids, mask=None, new=6):
    """Return the tokens of a prefix cache, which are those of its model alone."""
    expected = plain(cache.model, ids, mask, new)
    assert torch.equal(cached(cache, ids, mask, new), expected)
    return expected


def check_idle(cache):
    """Check that no block is in use."""
    blocks = cache.stats().blocks
    assert (blocks.num_referenced, blocks.num_pending) == (0, 0)


class Streamer(BaseStreamer):
    """Keeps the streamed tokens."""

    def __init__(self):
        self.streamed = []

    def put(self, value):
        self.streamed.append(value.flatten().tolist())

    def end(self):
        self.streamed.append("end")
