"""The transformers door: with and without it the same tokens, and never a byte of another prompt, model or tenant."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import transformers
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from kvcache.integrations.transformers import PrefixCache
from kvcache.integrations.transformers import cache as cache_module
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recorded_trace import RecordedTrace
from kvcache.recorder.format import Recording

pytestmark = pytest.mark.slow

VOCAB = 199
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that the next token depends on the whole context, not on the last token alone.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "gemma3": ("Gemma3", {"sliding_window": 24, "head_dim": 16, "layer_types": WINDOWS}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
}


@functools.cache
def model_of(kind="llama", dtype=torch.float32, seed=0, **changes):
    family, more = KINDS[kind]
    config_name = "Gemma3TextConfig" if kind == "gemma3" else f"{family}Config"
    model_name = "GPT2LMHeadModel" if kind == "gpt2" else f"{family}ForCausalLM"
    sizes = SIZES if kind != "gpt2" else {k: v for k, v in SIZES.items() if not k.startswith(("num", "max", "inter"))}
    config = getattr(transformers, config_name)(**{**sizes, **more, **changes})
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(config).to(dtype).eval()


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (1, length), generator=generator)


def plain(model, input_ids, attention_mask=None, new=6, **kwargs):
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    with torch.no_grad():
        return model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **kwargs)


def cached(cache, input_ids, attention_mask=None, new=6, **kwargs):
    return cache.generate(input_ids, attention_mask, max_new_tokens=new, do_sample=False, **kwargs)


def padded(lengths, pad=0):
    """Return ids and mask of prompts that begin alike, padded on the left."""
    columns = max(lengths)
    ids, mask = torch.full((len(lengths), columns), pad), torch.zeros((len(lengths), columns), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, columns - length :] = prompt_of(columns)[0, :length]
        mask[row, columns - length :] = 1
    return ids, mask


def assert_idle(cache):
    blocks = cache.stats().blocks
    assert (blocks.num_referenced, blocks.num_pending) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_turns_give_the_tokens_of_the_model_alone(kind):
    model = model_of(kind)
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(37)
    loaded = 0
    for turn in range(10):
        expected = plain(model, ids)
        assert torch.equal(cached(cache, ids), expected)
        assert cache.stats().loaded_tokens == loaded, turn
        # The last token of a turn was never fed to the model, so it has no keys and values yet.
        # The last block of a hit is computed again.
        loaded += (expected.shape[1] - 1) // 16 * 16 - 16
        ids = torch.cat([expected, prompt_of(5 + turn, seed=turn)], dim=1)
    assert_idle(cache)


def test_recorded_turns_replay_and_become_a_trace(tmp_path):
    model = model_of()
    cache = PrefixCache(model, num_blocks=6, record=tmp_path / "run.kvlog")
    ids = prompt_of(37)
    for turn in range(6):
        # The others evict what the conversation has stored.
        cached(cache, prompt_of(40, seed=100 + turn % 2))
        ids = torch.cat([cached(cache, ids), prompt_of(3, seed=turn)], dim=1)
    stats = cache.manager.stats()
    cache.manager.recorder.stop()
    assert min(stats.loaded_blocks, stats.evicted_blocks) > 0
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.end, outcome.num_lost) == (None, "", 0)
    assert outcome.num_calls > 30
    with RecordedTrace(tmp_path / "run.kvlog") as trace:
        requests = [request.hash_ids.tolist() for request in trace]
    assert len(requests) == 12
    assert requests[0] == requests[4] != requests[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_keys_and_values_are_the_computed_ones_bit_for_bit(kind, dtype):
    model = model_of(kind, dtype)
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(70)
    computed = cache.new_past()
    with torch.no_grad():
        model(ids, past_key_values=computed)
    assert cache.store(ids, computed) == 4
    past, n = cache.load(ids)
    assert n == past.get_seq_length() == 64
    for ours, theirs in zip(past.layers, computed.layers, strict=True):
        # The last block was computed again, to be compared with the stored one.
        for mine, stored in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.equal(mine[:, :, :48], stored[:, :, :48])
            error = (mine[:, :, 48:] - stored[:, :, 48:64]).float().norm() / stored[:, :, 48:64].float().norm()
            assert error <= 4 * torch.finfo(dtype).eps ** 0.75


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_exactly_those_of_the_same_split_without_a_store(kind, dtype):
    # The rule for bfloat16: a load changes nothing beyond what computing the prompt in two parts changes, bit for
    # bit. (Against the prompt in one part, sums are taken in another order; bfloat16 may then flip a near tie.)
    model = model_of(kind, dtype)
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(70)
    cached(cache, ids[:, :66], new=1)
    split = cache.new_past()
    with torch.no_grad():
        model(ids[:, :66], past_key_values=split)
    split.crop(-18)
    assert cache.load(ids)[1] == 64
    for _ in range(2):
        scores = [
            run(ids, new=8, return_dict_in_generate=True, output_logits=True).logits
            for run in (functools.partial(cached, cache), functools.partial(plain, model, past_key_values=split))
        ]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*scores, strict=True))
        split.crop(48 - split.get_seq_length())
        cache.clear()
        cached(cache, ids[:, :66], new=1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_bfloat16_logits_stay_within_rounding_of_the_prompt_in_one_part(kind):
    model = model_of(kind, torch.bfloat16)
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(70)
    cached(cache, ids, new=1)
    past, n = cache.load(ids)
    with torch.no_grad():
        whole = model(ids).logits[0, -1].float()
        rest = model(ids[:, n:], past_key_values=past).logits[0, -1].float()
    assert n == 64
    assert (whole - rest).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * whole.abs().max()


def test_prefix_that_diverges_within_a_block_is_loaded_up_to_that_block():
    model = model_of()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(60)
    cached(cache, ids)
    other = ids.clone()
    other[0, 37] = (other[0, 37] + 1) % VOCAB
    assert cache.load(other)[1] == 32
    assert torch.equal(cached(cache, other), plain(model, other))
    assert cache.load(ids[:, :40])[1] == 32


def test_at_least_one_token_is_left_to_compute():
    model = model_of()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(64)
    expected = cached(cache, ids)
    assert cache.load(ids)[1] == 63
    assert torch.equal(cached(cache, ids), expected)
    assert cache.load(ids[:, :1])[1] == 0


def test_tenants_with_equal_prompts_share_nothing():
    cache = PrefixCache(model_of(), num_blocks=64)
    ids = prompt_of(50)
    for salt in ("", "a", "b", b"a"):
        assert cache.load(ids, salt=salt)[1] == 0
        cached(cache, ids, salt=salt)
        assert cache.load(ids, salt=salt)[1] == 48
    assert cache.load(ids, salt="a", adapter="lora")[1] == 0
    assert cache.stats().blocks.stored_blocks == 4 * 3


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_few_blocks_are_enough_to_be_right(policy):
    model = model_of()
    cache = PrefixCache(model, num_blocks=5, policy=policy)
    for seed in (0, 1, 0, 2, 1, 0):
        ids = prompt_of(60, seed)
        assert torch.equal(cached(cache, ids), plain(model, ids))
    long = prompt_of(200)
    assert torch.equal(cached(cache, long), plain(model, long))
    assert cache.load(long)[1] == 5 * 16
    assert cache.stats().blocks.evicted_blocks == cache.stats().blocks.stored_blocks - 5
    assert_idle(cache)


def test_stored_bytes_decide_the_tokens():
    model = model_of()
    cache = PrefixCache(model, num_blocks=64, verify=False)
    ids = prompt_of(60)
    expected = cached(cache, ids, new=12)
    assert torch.equal(cached(cache, ids, new=12), expected)
    # The sign bit of every float: the negative control, without which equal tokens would prove nothing.
    cache._pool.tensor.view(torch.int32).bitwise_xor_(-(2**31))
    assert not torch.equal(cached(cache, ids, new=12), expected)


def test_a_shared_store_serves_only_the_same_model_dtype_and_block_size():
    ids = prompt_of(50)
    first = PrefixCache(model_of(), num_blocks=64)
    cached(first, ids)
    others = {
        "same": (model_of(), {}, 48),
        "weights": (model_of(seed=1), {}, 0),
        "dtype": (model_of(dtype=torch.bfloat16), {}, 0),
        "block size": (model_of(), {"block_size": 8}, 0),
        "config": (model_of(rms_norm_eps=1e-3), {}, 0),
        "architecture": (model_of("mistral"), {}, 0),
        "name": (model_of(), {"fingerprint": "other"}, 0),
    }
    for name, (model, options, expected) in others.items():
        other = PrefixCache(model, num_blocks=64, **options)
        other.manager, other._pool = first.manager, first._pool
        assert other.load(ids)[1] == expected, name


@pytest.mark.parametrize("name", [None, "org/model@1"])
def test_identity_attribute_changed_back_finds_blocks_again(name):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    cache = PrefixCache(model, num_blocks=64, fingerprint=name)
    ids = prompt_of(50)
    cached(cache, ids)
    model.model.layers[0].self_attn.scaling *= 2
    assert cache.load(ids)[1] == 0
    model.model.layers[0].self_attn.scaling /= 2
    assert cache.load(ids)[1] == 48
    assert cache.stats().rejected_hits == 0


def test_active_adapters_are_part_of_the_identity():
    # The attributes of peft's layers; peft 0.21.2 was tried by hand.
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(50)
    cached(cache, ids)
    model.peft_config = {"a": None, "b": None}
    layer = model.model.layers[0].self_attn.q_proj
    layer.merged_adapters, layer.disable_adapters = [], False
    for adapters, expected in ((["a"], 0), (["b"], 0), (["a"], 48), (["a", "b"], 0)):
        layer.active_adapters = adapters
        assert cache.load(ids)[1] == expected
        cached(cache, ids)
    layer.disable_adapters = True
    assert cache.load(ids)[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_padding_gives_the_tokens_of_the_model_alone(kind):
    model = model_of(kind)
    cache = PrefixCache(model, num_blocks=64)
    ids, mask = padded([70, 53, 64, 20])
    expected = plain(model, ids, mask)
    assert torch.equal(cached(cache, ids, mask), expected)
    # Rows begin at columns 0, 17, 6 and 50, and end whole blocks at 64, 65, 70 and 66.
    assert cache.load(ids, mask)[1] == 64
    assert torch.equal(cached(cache, ids, mask), expected)
    assert cache.stats().loaded_tokens == 2 * (48 + 31 + 42 + 0)
    assert_idle(cache)


def test_a_batch_loads_the_columns_that_every_row_has():
    model = model_of()
    cache = PrefixCache(model, num_blocks=64)
    ids, mask = padded([70, 60])
    cached(cache, ids[:1], new=1)
    ids[1, 30:] = prompt_of(40, seed=9)
    assert cache.load(ids, mask)[1] == 10 + 16
    assert torch.equal(cached(cache, ids, mask), plain(model, ids, mask))
    ids[1, 10:] = prompt_of(60, seed=10)
    assert cache.load(ids, mask)[1] == 10
    assert torch.equal(cached(cache, ids, mask), plain(model, ids, mask))
    ids[0] = prompt_of(70, seed=11)
    assert cache.load(ids, mask)[1] == 0


def test_padding_behind_the_end_of_a_row_is_not_stored():
    model = model_of()
    ids = torch.cat([prompt_of(20), prompt_of(20, seed=1)])
    first = plain(model, ids, new=40)
    end = int(first[0, 23])
    assert end not in first[1, 20:]
    cache = PrefixCache(model, num_blocks=64)
    tokens = cached(cache, ids, torch.ones_like(ids), new=40, eos_token_id=end, pad_token_id=0)
    assert tokens[0, 24:].tolist() == [0] * 36
    # 24 tokens make one block; 59 tokens make three.
    assert cache.stats().blocks.stored_blocks == 1 + 3


def test_load_and_store_serve_a_loop_of_ones_own():
    model = model_of("mistral")
    cache = PrefixCache(model, memory="1MiB")
    ids = prompt_of(40)
    for expected_n in (0, 32):
        past, n = cache.load(ids)
        assert n == expected_n
        with torch.no_grad():
            logits = model(ids[:, n:], past_key_values=past).logits[:, -1]
        assert logits.argmax().item() == plain(model, ids, new=1)[0, -1].item()
        assert cache.store(ids, past) == (2 if n == 0 else 0)


def test_sampling_streaming_and_chunked_prefill_are_as_without():
    model = model_of()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(60)
    streamed = []

    class Streamer(BaseStreamer):
        def put(self, value):
            streamed.append(value.flatten().tolist())

        def end(self):
            streamed.append("end")

    for _ in range(2):
        kwargs = {"max_new_tokens": 8, "do_sample": True, "top_k": 50, "prefill_chunk_size": 7}
        torch.manual_seed(3)
        expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **kwargs)
        torch.manual_seed(3)
        assert torch.equal(cache.generate(ids, streamer=Streamer(), **kwargs), expected)
        assert streamed == [ids[0].tolist(), *[[token] for token in expected[0, 60:].tolist()], "end"]
        streamed.clear()


def test_threads_share_a_small_store():
    model = model_of()
    cache = PrefixCache(model, num_blocks=9)
    prompts = [torch.cat([prompt_of(32), prompt_of(20, seed)], dim=1) for seed in range(4)]
    expected = [plain(model, ids) for ids in prompts]
    wrong = []

    def serve(offset):
        for i in range(12):
            which = (i + offset) % len(prompts)
            if not torch.equal(cached(cache, prompts[which]), expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=serve, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert_idle(cache)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_generate_that_breaks_off_leaves_nothing_behind(error):
    model = model_of()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(60)
    cached(cache, ids)
    before = cache.stats().blocks

    class Break(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise error("broken off")

    with pytest.raises(error, match="broken off"):
        cached(cache, torch.cat([ids, ids], dim=1), logits_processor=LogitsProcessorList([Break()]))
    assert_idle(cache)
    assert cache.stats().blocks.num_free == before.num_free
    assert torch.equal(cached(cache, ids), plain(model, ids))


@pytest.mark.parametrize("broken", ["pack", "unpack"])
def test_a_copy_that_fails_gives_its_blocks_back(monkeypatch, broken):
    model = model_of()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(60)
    if broken == "unpack":
        cached(cache, ids)
    free = cache.stats().blocks.num_free
    with monkeypatch.context() as patch:

        def fail(*args):
            raise MemoryError(broken)

        patch.setattr(cache._layout, broken, fail)
        with pytest.raises(MemoryError, match=broken):
            cached(cache, ids)
    assert_idle(cache)
    assert cache.stats().blocks.num_free == free
    assert torch.equal(cached(cache, ids), plain(model, ids))


def test_a_generate_that_ignores_the_prefix_is_an_error(monkeypatch):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(60)
    cached(cache, ids)
    stored = cache.stats().blocks.stored_blocks

    def ignore(input_ids, past_key_values, **kwargs):
        with torch.no_grad():
            model(input_ids, past_key_values=past_key_values)
        return torch.cat([input_ids, input_ids[:, :1]], dim=1)

    monkeypatch.setattr(model, "generate", ignore)
    with pytest.raises(RuntimeError, match="left 92 columns of keys and values for 61 tokens"):
        cached(cache, ids)
    assert cache.stats().blocks.stored_blocks == stored
    assert_idle(cache)


def test_release_of_transformers_is_checked():
    for version in ("5.21.0", "5.22.2", transformers.__version__):
        cache_module._check_release(version)
    for version in ("4.57.6", "5.20.2", "5.24.0.dev0", "6.0"):
        with pytest.raises(
            RuntimeError, match=f"transformers {version} has not been tried with kvcache; 5.21 to 5.23 have"
        ):
            cache_module._check_release(version)


def test_stats_tell_what_was_spared():
    cache = PrefixCache(model_of(), num_blocks=64)
    assert cache.stats().hit_rate == 0.0
    ids = prompt_of(64)
    cached(cache, ids)
    cached(cache, ids)
    stats = cache.stats()
    assert (stats.prompt_tokens, stats.loaded_tokens, stats.hit_rate) == (128, 47, 47 / 128)
    assert (stats.blocks.hit_blocks, stats.blocks.loaded_blocks) == (4, 4)


def test_hints_of_next_use_reach_the_manager():
    model = model_of()
    cache = PrefixCache(model, num_blocks=8)
    ids = prompt_of(40)
    answer = cache.generate(ids, max_new_tokens=1, do_sample=False, next_use="soon")
    assert cache.stats().blocks.retained_blocks == 2
    cache.hint(answer, "end")
    assert cache.stats().blocks.retained_blocks == 0
    cache.hint(ids, "soon", salt="another")
    assert cache.stats().blocks.retained_blocks == 0
    assert cache.load(ids, next_use="soon")[1] == 32
    assert cache.stats().blocks.retained_blocks == 2
    # A tool's prompt stays while others come and go; the blocks that ended leave first.
    for seed in range(1, 5):
        cache.generate(prompt_of(40, seed), max_new_tokens=1, do_sample=False, next_use="end")
    assert cache.load(ids)[1] == 32
    assert_idle(cache)


@pytest.mark.parametrize("method", ["load", "store", "generate", "hint"])
def test_a_bad_next_use_is_named_and_nothing_is_kept(method):
    model = model_of()
    cache = PrefixCache(model, num_blocks=8)
    ids = prompt_of(40)
    more = {"load": [], "generate": [], "store": [cache.new_past()], "hint": []}[method]
    with pytest.raises(ValueError, match=r"next_use must be one of 'end', 'soon', 'later', got 'never'"):
        getattr(cache, method)(ids, *more, next_use="never")
    assert cache.stats().blocks.stored_blocks == 0
