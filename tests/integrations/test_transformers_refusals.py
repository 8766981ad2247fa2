"""What the transformers door refuses: a clear error that names the value, before anything changes."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

from kvcache.integrations.transformers import PrefixCache

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Two layers, keys and values, two heads, 8 floats of 4 bytes.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def built(family="Llama", config_name=None, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, config_name or f"{family}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@functools.cache
def llama():
    return built()


def ids_of(*shape):
    return torch.randint(2, 99, shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def cache():
    return PrefixCache(llama(), num_blocks=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of num_blocks and memory, got num_blocks=None, memory=None"),
        ({"num_blocks": 4, "memory": "1MiB"}, "give one of num_blocks and memory"),
        ({"num_blocks": 0}, "num_blocks must be an int >= 1, got 0"),
        ({"num_blocks": True}, "num_blocks must be an int >= 1, got True"),
        ({"memory": "2 parsecs"}, "memory must be bytes >= 1 or a size such as .*, got '2 parsecs'"),
        ({"memory": -1}, "memory must be bytes >= 1 or a size such as .*, got -1"),
        ({"memory": 1.5}, "memory must be bytes >= 1 or a size such as .*, got 1.5"),
        ({"memory": 16 * TOKEN_BYTES - 1}, f"no room for a block: 16 tokens of this model take {16 * TOKEN_BYTES} b"),
        ({"memory": "2KiB", "block_size": 64}, "memory='2KiB' has no room for a block: 64 tokens"),
        ({"memory": "900GiB"}, "does not fit into host memory"),
        ({"num_blocks": 4, "block_size": 0}, "block_size must be an int >= 1, got 0"),
        ({"num_blocks": 4, "policy": "lro"}, "unknown policy 'lro', known ones: .*did you mean 'lru'"),
        ({"num_blocks": 4, "fingerprint": ""}, "fingerprint must be a non-empty str or None, got ''"),
    ],
)
def test_refuses_bad_sizes_at_start(options, message):
    with pytest.raises(ValueError, match=message):
        PrefixCache(llama(), **options)


@pytest.mark.parametrize("model", ["gpt2", None, torch.nn.Linear(2, 2)])
def test_refuses_what_is_no_model(model):
    with pytest.raises(ValueError, match=r"model must be a transformers model .*, got .*; load it first: AutoModel"):
        PrefixCache(model, num_blocks=4)


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [(16 * TOKEN_BYTES, 1), (3 * 16 * TOKEN_BYTES - 1, 2), ("1MiB", 256), ("1 MB", 244), ("0.5mib", 128), ("8192", 2)],
)
def test_memory_is_counted_in_whole_blocks(memory, num_blocks):
    cache = PrefixCache(llama(), memory=memory)
    assert (cache.num_blocks, cache.block_bytes) == (num_blocks, 16 * TOKEN_BYTES)


def test_refuses_models_whose_cache_cannot_be_cut_at_a_block():
    linear = built(
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(ValueError, match="layer 0 of Qwen3NextForCausalLM keeps a LinearAttentionLayer; only"):
        PrefixCache(linear, num_blocks=4)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        PrefixCache(t5, num_blocks=4)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_refuses_rotary_embeddings_that_depend_on_the_whole_prompt(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128}
    with pytest.raises(ValueError, match=f"rotary embeddings of type '{rope_type}', which change"):
        PrefixCache(built(rope_parameters=rope), num_blocks=4)


def test_refuses_a_model_that_looks_ahead():
    model = built("Gemma3", "Gemma3TextConfig", use_bidirectional_attention=True, initializer_range=0.2)
    with pytest.raises(ValueError, match="Gemma3ForCausalLM is not causal: layer 1 changes the keys of a prefix"):
        PrefixCache(model, num_blocks=4)


def test_refuses_a_model_in_training_mode():
    model = built()
    cache = PrefixCache(model, num_blocks=4)
    model.train()
    with pytest.raises(ValueError, match=r"in training mode.*call model.eval\(\) first"):
        PrefixCache(model, num_blocks=4)
    with pytest.raises(ValueError, match="in training mode"):
        cache.generate(ids_of(1, 8))


@pytest.mark.parametrize("bad", [99, -1, 2**31])
def test_refuses_ids_outside_the_vocabulary(cache, bad):
    ids = ids_of(2, 20)
    ids[1, 7] = bad
    message = f"token id {bad} at row 1, column 7 is outside the vocabulary, 0..98"
    for call in (cache.load, cache.generate, lambda ids: cache.store(ids, cache.new_past())):
        with pytest.raises(ValueError, match=message):
            call(ids)
    assert cache.stats().prompt_tokens == cache.stats().blocks.lookups == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (ids_of(8), r"shape \(batch, columns\), neither 0, got \(8,\)"),
        (ids_of(1, 0), r"got \(1, 0\)"),
        ([[1, 2]], r"got \[\[1, 2\]\]"),
        (torch.ones(1, 4), "must be int64 or int32, got torch.float32"),
    ],
)
def test_refuses_ids_of_another_form(cache, ids, message):
    with pytest.raises(ValueError, match=message):
        cache.load(ids)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])
def test_refuses_padding_that_is_not_on_the_left(cache, mask):
    for call in (cache.load, cache.generate):
        with pytest.raises(ValueError, match="row 1 of attention_mask must be zeros, then ones"):
            call(ids_of(2, 4), torch.tensor([[0, 0, 1, 1], mask]))


def test_refuses_a_mask_of_another_shape(cache):
    with pytest.raises(ValueError, match=r"the shape of input_ids, \(1, 4\), got \(1, 5\)"):
        cache.load(ids_of(1, 4), torch.ones(1, 5))


def test_refuses_to_guess_what_is_padding(cache):
    ids = ids_of(1, 20)
    ids[0, 3] = 0
    with pytest.raises(ValueError, match="input_ids hold the padding token 0: pass attention_mask"):
        cache.generate(ids)
    assert cache.generate(ids, torch.ones_like(ids), max_new_tokens=1).shape == (1, 21)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "generation mode 'beam_search' is not supported"),
        ({"prompt_lookup_num_tokens": 3}, "generation mode 'assisted_generation' is not supported"),
        ({"num_return_sequences": 2, "do_sample": True}, r"generate\(num_return_sequences=2\) is not supported"),
        ({"use_cache": False}, r"generate\(use_cache=False\) is not supported"),
        ({"cache_implementation": "static"}, r"generate\(cache_implementation='static'\) is not supported"),
        ({"token_healing": True}, r"generate\(token_healing=True\) is not supported"),
        ({"assistant_model": "any"}, r"generate\(assistant_model=...\) is not supported"),
        ({"past_key_values": "any"}, r"generate\(past_key_values=...\) is not supported"),
        ({"inputs_embeds": "any"}, r"generate\(inputs_embeds=...\) is not supported"),
        ({"position_ids": "any"}, r"generate\(position_ids=...\) is not supported: block keys depend"),
        ({"pixel_values": "any"}, r"generate\(pixel_values=...\) is not supported"),
    ],
)
def test_refuses_other_ways_to_generate(cache, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cache.generate(ids_of(1, 20), **kwargs)
    if kwargs.keys() <= vars(transformers.GenerationConfig()).keys():
        with pytest.raises(ValueError, match=message):
            cache.generate(ids_of(1, 20), generation_config=transformers.GenerationConfig(**kwargs))
    assert cache.stats().blocks.lookups == 0


@pytest.mark.parametrize(("option", "value"), [("salt", 7), ("adapter", b"lora"), ("adapter", None)])
def test_refuses_a_salt_or_adapter_of_another_type(cache, option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*str.*, got {value!r}"):
        cache.load(ids_of(1, 20), **{option: value})


def test_refuses_to_store_what_is_not_this_models(cache):
    ids = ids_of(1, 40)
    filled = cache.new_past()
    with torch.no_grad():
        llama()(ids, past_key_values=filled)
    other = PrefixCache(built(num_hidden_layers=1), num_blocks=4)
    wide = PrefixCache(built(head_dim=16), num_blocks=4)
    half = PrefixCache(built().to(torch.float16), num_blocks=4)
    for target, past, message in (
        (other, filled, "past must be a cache of 1 layers, got 2 layers"),
        (cache, ((1, 2), (3, 4)), "past must be a cache of 2 layers, got tuple"),
        (wide, filled, r"layer 0 of past must be of shape \(1, 2, 40, 16\), got \(1, 2, 40, 8\)"),
        (half, filled, "layer 0 of past holds torch.float32, the model's holds torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            target.store(ids, past)
    with pytest.raises(ValueError, match=r"layer 0 of past must be of shape \(2, 2, 40, 8\)"):
        cache.store(ids.repeat(2, 1), filled)
    assert cache.stats().blocks.num_free == 8
    assert cache.store(ids, filled) == 2


def test_refuses_a_past_whose_window_has_dropped_tokens():
    model = built("Mistral", sliding_window=16)
    cache = PrefixCache(model, num_blocks=8)
    ids = ids_of(1, 40)
    past = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
    with pytest.raises(ValueError, match=r"got \(1, 2, 15, 8\); its window has dropped the rest"):
        cache.store(ids, past)
    short = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :15], past_key_values=short)
    assert cache.store(ids[:, :15], short) == 0
    assert cache.stats().blocks.num_free == 8
