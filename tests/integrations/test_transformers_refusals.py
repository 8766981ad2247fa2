"""What the transformers door refuses: a clear error that names the value, before anything changes."""

import pytest
import torch
import transformers
from small_models import built, model_of, prompt_of

from kvcache.integrations.transformers import PrefixCache
from kvcache.integrations.transformers.layout import CACHE_ARGUMENT

SMALL = {"hidden_size": 32, "head_dim": 8, "pad_token_id": 0}
# Two layers, keys and values, two heads, 8 floats of 4 bytes; 16 tokens.
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 16


def ids_of(rows, columns, bad=None):
    """Return ids, with a bad one at row 1, column 7."""
    ids = prompt_of(columns).repeat(rows, 1)
    if bad is not None:
        ids[1, 7] = bad
    return ids


@pytest.fixture
def cache():
    return PrefixCache(model_of(**SMALL), num_blocks=8)


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
        ({"memory": BLOCK_BYTES - 1}, f"no room for a block: 16 tokens of this model take {BLOCK_BYTES} b"),
        ({"memory": "2KiB", "block_size": 64}, "memory='2KiB' has no room for a block: 64 tokens"),
        ({"memory": "900GiB"}, "does not fit into host memory"),
        ({"num_blocks": 4, "block_size": 0}, "block_size must be an int >= 1, got 0"),
        ({"num_blocks": 4, "policy": "lro"}, "unknown policy 'lro', known ones: .*did you mean 'lru'"),
        ({"num_blocks": 4, "fingerprint": ""}, "fingerprint must be a non-empty str or None, got ''"),
    ],
)
def test_invalid_options_are_refused_at_start(options, message):
    with pytest.raises(ValueError, match=message):
        PrefixCache(model_of(**SMALL), **options)


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [(BLOCK_BYTES, 1), (3 * BLOCK_BYTES - 1, 2), ("1MiB", 256), ("1 MB", 244), ("0.5mib", 128), ("8192", 2)],
)
def test_memory_is_counted_in_whole_blocks(memory, num_blocks):
    cache = PrefixCache(model_of(**SMALL), memory=memory)
    assert (cache.num_blocks, cache.block_bytes) == (num_blocks, BLOCK_BYTES)


ROPE = {"rope_theta": 10000.0, "factor": 2.0}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128}
LINEAR = {
    "kind": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
T5 = {"vocab_size": 99, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
NO_MODEL = r"model must be a transformers model .*, got .*; load it first: AutoModel"
STRETCHED = "rotary embeddings of type '{}', which change"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "gpt2", NO_MODEL),
        (lambda: None, NO_MODEL),
        (lambda: torch.nn.Linear(2, 2), NO_MODEL),
        (lambda: built(**LINEAR), "layer 0 of Qwen3NextForCausalLM keeps a LinearAttentionLayer; only"),
        (
            lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval(),
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
        (lambda: built(rope_parameters={"rope_type": "dynamic", **ROPE}), STRETCHED.format("dynamic")),
        (
            lambda: built(**SMALL, rope_parameters={"rope_type": "longrope", **ROPE, **LONG}),
            STRETCHED.format("longrope"),
        ),
        (
            lambda: built("gemma3_text", use_bidirectional_attention=True),
            "Gemma3ForCausalLM is not causal: layer 1 changes the keys of a prefix",
        ),
        (lambda: built().train(), r"in training mode.*call model.eval\(\) first"),
    ],
    ids=["name", "nothing", "no transformer", "linear", "T5", "dynamic", "longrope", "looks ahead", "training"],
)
def test_models_without_reusable_blocks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        PrefixCache(make(), num_blocks=4)


def test_generate_in_training_mode_is_refused():
    model = built()
    cache = PrefixCache(model, num_blocks=4)
    model.train()
    with pytest.raises(ValueError, match="in training mode"):
        cache.generate(ids_of(1, 8))


OUTSIDE = "token id {} at row 1, column 7 is outside the vocabulary, 0..198"
NOT_LEFT = "row 1 of attention_mask must be zeros, then ones"


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (prompt_of(8)[0], None, r"shape \(batch, columns\), neither 0, got \(8,\)"),
        (ids_of(1, 0), None, r"got \(1, 0\)"),
        ([[1, 2]], None, r"got \[\[1, 2\]\]"),
        (torch.ones(1, 4), None, "must be int64 or int32, got torch.float32"),
        *[(ids_of(2, 20, bad), None, OUTSIDE.format(bad)) for bad in (199, -1, 2**31)],
        *[(ids_of(2, 4), [[0, 0, 1, 1], row], NOT_LEFT) for row in ([1, 1, 1, 0], [1, 0, 1, 1], [0] * 4, [0, 1, 0, 1])],
        (ids_of(1, 4), [[1] * 5], r"the shape of input_ids, \(1, 4\), got \(1, 5\)"),
    ],
)
def test_invalid_ids_and_masks_are_refused(cache, ids, mask, message):
    mask = None if mask is None else torch.tensor(mask)
    for call in (cache.load, cache.generate, lambda ids, mask: cache.store(ids, cache.new_past(), mask)):
        with pytest.raises(ValueError, match=message):
            call(ids, mask)
    assert cache.stats().prompt_tokens == cache.stats().blocks.lookups == 0


def test_padding_without_mask_is_refused(cache):
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
        *[
            ({name: "any"}, rf"generate\({name}=...\) is not supported: block keys depend")
            for name in ("assistant_model", "cache", "past_key_values", "inputs_embeds", "position_ids", "pixel_values")
        ],
    ],
)
def test_other_ways_to_generate_are_refused(cache, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cache.generate(ids_of(1, 20), **kwargs)
    if kwargs.keys() <= vars(transformers.GenerationConfig()).keys():
        with pytest.raises(ValueError, match=message):
            cache.generate(ids_of(1, 20), generation_config=transformers.GenerationConfig(**kwargs))
    assert cache.stats().blocks.lookups == 0


@pytest.mark.parametrize(("option", "value"), [("salt", 7), ("adapter", b"lora"), ("adapter", None)])
def test_salt_of_wrong_type_is_refused(cache, option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*str.*, got {value!r}"):
        cache.load(ids_of(1, 20), **{option: value})


def test_store_of_foreign_past_is_refused(cache):
    ids = ids_of(1, 40)
    filled = cache.new_past()
    with torch.no_grad():
        cache.model(ids, **{CACHE_ARGUMENT: filled})
    other, wide, half = (
        PrefixCache(built(**{**SMALL, **changes}), num_blocks=4)
        for changes in ({"num_hidden_layers": 1}, {"head_dim": 16}, {"dtype": torch.float16})
    )
    for target, rows, past, message in (
        (other, 1, filled, "past must be a cache of 1 layers, got 2 layers"),
        (cache, 1, ((1, 2), (3, 4)), "past must be a cache of 2 layers, got tuple"),
        (wide, 1, filled, r"layer 0 of past must be of shape \(1, 2, 40, 16\), got \(1, 2, 40, 8\)"),
        (half, 1, filled, "layer 0 of past holds torch.float32, the model's holds torch.float16"),
        (cache, 2, filled, r"layer 0 of past must be of shape \(2, 2, 40, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            target.store(ids.repeat(rows, 1), past)
    assert cache.stats().blocks.num_free == 8
    assert cache.store(ids, filled) == 2


def test_store_past_dropped_window_is_refused():
    cache = PrefixCache(built("mistral", sliding_window=16), num_blocks=8)
    ids = ids_of(1, 40)
    whole, short = (transformers.DynamicCache(config=cache.model.config) for _ in range(2))
    with torch.no_grad():
        cache.model(ids, **{CACHE_ARGUMENT: whole})
        cache.model(ids[:, :15], **{CACHE_ARGUMENT: short})
    with pytest.raises(ValueError, match=r"got \(1, 2, 15, 16\); its window has dropped the rest"):
        cache.store(ids, whole)
    assert cache.store(ids[:, :15], short) == 0
    assert cache.stats().blocks.num_free == 8
