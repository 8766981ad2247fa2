"""The transformers door: with and without it the same tokens, and never a byte of another prompt, model or tenant."""

import functools
import threading
from unittest.mock import Mock

import pytest
import torch
import transformers
from small_models import (
    KINDS,
    SIZES,
    Streamer,
    built,
    cached,
    check_answer,
    check_idle,
    model_of,
    padded,
    plain,
    prompt_of,
)
from transformers.generation import LogitsProcessorList

from kvcache.integrations.transformers import PrefixCache
from kvcache.integrations.transformers import cache as cache_module
from kvcache.integrations.transformers.layout import CACHE_ARGUMENT
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recorded_trace import RecordedTrace
from kvcache.lab.traces.recording import Recording

EACH_KIND = [pytest.param(kind, marks=[] if kind in ("llama", "gpt2") else pytest.mark.slow) for kind in KINDS]
# Their arithmetic does not depend on the number of tokens in a forward, as the routing of experts does.
DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2"]
IDS = prompt_of(60)


@pytest.fixture
def cache():
    return PrefixCache(model_of(), num_blocks=64)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_ten_turns_return_models_tokens(kind):
    cache = PrefixCache(model_of(kind), num_blocks=64)
    ids = prompt_of(37)
    loaded = 0
    for turn in range(10):
        answer = check_answer(cache, ids)
        assert cache.stats().loaded_tokens == loaded, turn
        # The last token of a turn was never fed to the model, so it has no keys and values yet.
        # The last block of a hit is computed again.
        loaded += (answer.shape[1] - 1) // 16 * 16 - 16
        ids = torch.cat([answer, prompt_of(5 + turn, seed=turn)], dim=1)
    check_idle(cache)


def test_recorded_turns_become_a_trace(tmp_path):
    cache = PrefixCache(model_of(), num_blocks=6, record=tmp_path / "run.kvlog")
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


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_keys_and_values_are_exact(kind, dtype):
    model = model_of(kind, dtype=dtype)
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(70)
    computed = cache.new_past()
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: computed})
    assert cache.store(ids, computed) == 4
    past, n = cache.load(ids)
    assert n == past.get_seq_length() == 64
    for ours, theirs in zip(past.layers, computed.layers, strict=True):
        # The last block was computed again, to be compared with the stored one.
        for mine, stored in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.equal(mine[:, :, :48], stored[:, :, :48])
            error = (mine[:, :, 48:] - stored[:, :, 48:64]).float().norm() / stored[:, :, 48:64].float().norm()
            assert error <= 4 * torch.finfo(dtype).eps ** 0.75


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_equal_those_of_same_split(kind, dtype):
    # The rule for bfloat16: a load changes nothing beyond what computing the prompt in two parts changes, bit for
    # bit. (Against the prompt in one part, sums are taken in another order; bfloat16 may then flip a near tie.)
    model = model_of(kind, dtype=dtype)
    cache = PrefixCache(model, num_blocks=64)
    ids = prompt_of(70)
    cached(cache, ids[:, :66], new=1)
    split = cache.new_past()
    with torch.no_grad():
        model(ids[:, :66], **{CACHE_ARGUMENT: split})
    split.crop(-18)
    assert cache.load(ids)[1] == 64
    for _ in range(2):
        scores = [
            run(ids, new=8, return_dict_in_generate=True, output_logits=True).logits
            for run in (functools.partial(cached, cache), functools.partial(plain, model, **{CACHE_ARGUMENT: split}))
        ]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*scores, strict=True))
        split.crop(48 - split.get_seq_length())
        cache.clear()
        cached(cache, ids[:, :66], new=1)


def test_diverging_prefix_loads_up_to_block(cache):
    cached(cache, IDS)
    other = IDS.clone()
    other[0, 37] = (other[0, 37] + 1) % SIZES["vocab_size"]
    assert cache.load(other)[1] == 32
    check_answer(cache, other)
    assert cache.load(IDS[:, :40])[1] == 32


def test_whole_prompt_leaves_one_token(cache):
    assert cache.stats().hit_rate == 0.0
    ids = prompt_of(64)
    check_answer(cache, ids)
    check_answer(cache, ids)
    stats = cache.stats()
    assert (stats.prompt_tokens, stats.loaded_tokens, stats.hit_rate) == (128, 47, 47 / 128)
    assert (stats.blocks.hit_blocks, stats.blocks.loaded_blocks) == (4, 4)
    assert cache.load(ids)[1] == 63
    assert cache.load(ids[:, :1])[1] == 0


def test_tenants_with_equal_prompts_share_nothing(cache):
    for salt in ("", "a", "b", b"a"):
        assert cache.load(IDS, salt=salt)[1] == 0
        cached(cache, IDS, salt=salt)
        assert cache.load(IDS, salt=salt)[1] == 48
    assert cache.load(IDS, salt="a", adapter="lora")[1] == 0
    assert cache.stats().blocks.stored_blocks == 4 * 4


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_few_blocks_are_enough(policy):
    cache = PrefixCache(model_of(), num_blocks=5, policy=policy)
    for seed in (0, 1, 0, 2, 1, 0):
        check_answer(cache, prompt_of(60, seed))
    long = prompt_of(200)
    check_answer(cache, long)
    assert cache.load(long)[1] == 5 * 16
    assert cache.stats().blocks.evicted_blocks == cache.stats().blocks.stored_blocks - 5
    check_idle(cache)


def test_stored_bytes_decide_the_tokens():
    cache = PrefixCache(model_of(), num_blocks=64, verify=False)
    expected = cached(cache, IDS, new=12)
    assert torch.equal(cached(cache, IDS, new=12), expected)
    # The sign bit of every float: the negative control, without which equal tokens would prove nothing.
    cache._pool.tensor.view(torch.int32).bitwise_xor_(-(2**31))
    assert not torch.equal(cached(cache, IDS, new=12), expected)


@pytest.mark.parametrize(
    ("of_model", "options", "expected"),
    [
        ({}, {}, 48),
        ({"seed": 1}, {}, 0),
        ({"dtype": torch.bfloat16}, {}, 0),
        ({}, {"block_size": 8}, 0),
        ({"rms_norm_eps": 1e-3}, {}, 0),
        ({"kind": "mistral"}, {}, 0),
        ({}, {"fingerprint": "other"}, 0),
    ],
    ids=["same", "weights", "dtype", "block size", "config", "architecture", "name"],
)
def test_shared_store_serves_only_same_model(cache, of_model, options, expected):
    cached(cache, IDS)
    other = PrefixCache(model_of(**of_model), num_blocks=64, **options)
    other.manager, other._pool = cache.manager, cache._pool
    assert other.load(IDS)[1] == expected


@pytest.mark.parametrize("name", [None, "org/model@1"])
def test_restored_identity_finds_blocks_again(name):
    model = built()
    cache = PrefixCache(model, num_blocks=64, fingerprint=name)
    cached(cache, IDS)
    model.model.layers[0].self_attn.scaling *= 2
    assert cache.load(IDS)[1] == 0
    model.model.layers[0].self_attn.scaling /= 2
    assert cache.load(IDS)[1] == 48
    assert cache.stats().rejected_hits == 0


def test_active_adapters_belong_to_identity():
    # The attributes of peft's layers; peft 0.21.2 was tried by hand.
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    cached(cache, IDS)
    model.peft_config = {"a": None, "b": None}
    layer = model.model.layers[0].self_attn.q_proj
    layer.merged_adapters, layer.disable_adapters = [], False
    for adapters, expected in ((["a"], 0), (["b"], 0), (["a"], 48), (["a", "b"], 0)):
        layer.active_adapters = adapters
        assert cache.load(IDS)[1] == expected
        cached(cache, IDS)
    layer.disable_adapters = True
    assert cache.load(IDS)[1] == 0


@pytest.mark.parametrize("kind", EACH_KIND)
def test_padded_batch_returns_models_tokens(kind):
    cache = PrefixCache(model_of(kind), num_blocks=64)
    ids, mask = padded(70, 53, 64, 20)
    check_answer(cache, ids, mask)
    # Rows begin at columns 0, 17, 6 and 50, and end whole blocks at 64, 65, 70 and 66.
    assert cache.load(ids, mask)[1] == 64
    check_answer(cache, ids, mask)
    assert cache.stats().loaded_tokens == 2 * (48 + 31 + 42 + 0)
    check_idle(cache)


def test_batch_loads_columns_of_every_row(cache):
    ids, mask = padded(70, 60)
    cached(cache, ids[:1], new=1)
    ended, finish = [], cache.manager.on_request_finished
    cache.manager.on_request_finished = lambda context: (ended.append(context), finish(context))
    for column, seed, found in ((30, 9, 10 + 16), (10, 10, 10)):
        ids[1, column:] = prompt_of(70 - column, seed)
        assert cache.load(ids, mask)[1] == found
        assert len(ended) == 2
        check_answer(cache, ids, mask)
        ended.clear()
    ids[0] = prompt_of(70, seed=11)
    assert cache.load(ids, mask)[1] == 0


def test_padding_behind_row_is_not_stored(cache):
    ids = torch.cat([prompt_of(20), prompt_of(20, seed=1)])
    first = plain(cache.model, ids, new=40)
    end = int(first[0, 23])
    assert end not in [*first[0, 20:23], *first[1, 20:]]
    tokens = cached(cache, ids, torch.ones_like(ids), new=40, eos_token_id=end, pad_token_id=0)
    assert tokens[0, 24:].tolist() == [0] * 36
    # 24 tokens make one block; 59 tokens make three.
    assert cache.stats().blocks.stored_blocks == 1 + 3


def test_load_and_store_serve_own_loop():
    model = model_of("mistral")
    cache = PrefixCache(model, memory="1MiB")
    ids = prompt_of(40)
    for expected_n in (0, 32):
        past, n = cache.load(ids)
        assert n == expected_n
        with torch.no_grad():
            logits = model(ids[:, n:], **{CACHE_ARGUMENT: past}).logits[:, -1]
        assert logits.argmax().item() == plain(model, ids, new=1)[0, -1].item()
        assert cache.store(ids, past) == (2 if n == 0 else 0)


def test_sampling_and_streaming_equal_the_model():
    model, gain = built(), [1.0]
    # A change that only a computation shows.
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, output: output * gain[0])
    cache = PrefixCache(model, num_blocks=64)
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 50, "prefill_chunk_size": 7}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    for state in ("miss", "hit", "rejected hit"):
        if state == "rejected hit":
            gain[0] = 1.1
        outputs = []
        for generate, more in ((model.generate, {"attention_mask": torch.ones_like(IDS)}), (cache.generate, {})):
            torch.manual_seed(3)
            streamer = Streamer()
            outputs.append(generate(input_ids=IDS, streamer=streamer, **options, **more))
        expected, found = outputs
        assert torch.equal(found.sequences, expected.sequences), state
        if state != "hit":  # after a hit, sums are taken in another order
            assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True)), state
        streamed = [[token] for token in expected.sequences[0, 60:].tolist()]
        assert streamer.streamed == [IDS[0].tolist(), *streamed, "end"], state
    assert cache.stats().rejected_hits == 1


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
    check_idle(cache)


@pytest.mark.parametrize(
    ("where", "error"),
    [("pack", MemoryError), ("unpack", MemoryError), ("processor", RuntimeError), ("processor", KeyboardInterrupt)],
)
def test_failed_generate_returns_its_blocks(cache, monkeypatch, where, error):
    if where != "pack":
        cached(cache, IDS)
    num_free = cache.stats().blocks.num_free
    fail, processors = Mock(side_effect=error("broken off")), LogitsProcessorList()
    with monkeypatch.context() as patch:
        if where == "processor":
            processors.append(fail)
        else:
            patch.setattr(cache._layout, where, fail)
        with pytest.raises(error, match="broken off"):
            cached(cache, torch.cat([IDS, IDS], dim=1), logits_processor=processors)
    check_idle(cache)
    assert cache.stats().blocks.num_free == num_free
    check_answer(cache, IDS)


def test_generate_ignoring_prefix_raises(monkeypatch):
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    cached(cache, IDS)
    stored = cache.stats().blocks.stored_blocks

    def ignore(input_ids, **kwargs):
        with torch.no_grad():
            model(input_ids, **{CACHE_ARGUMENT: kwargs[CACHE_ARGUMENT]})
        return torch.cat([input_ids, input_ids[:, :1]], dim=1)

    monkeypatch.setattr(model, "generate", ignore)
    with pytest.raises(RuntimeError, match="left 92 columns of keys and values for 61 tokens"):
        cached(cache, IDS)
    assert cache.stats().blocks.stored_blocks == stored
    check_idle(cache)


def test_check_release_untried_release_is_refused():
    for version in ("5.21.0", "5.22.2", transformers.__version__):
        cache_module._check_release(version)
    for version in ("4.57.6", "5.20.2", "5.26.0.dev0", "6.0", "6.25.0"):
        message = f"transformers {version} has not been tried with kvcache; 5.21 to 5.24 have"
        with pytest.raises(RuntimeError, match=message):
            cache_module._check_release(version)


def test_check_release_next_minor_is_logged(caplog):
    for version in ("5.25.0", "5.25.0.dev0", "5.25.3"):
        caplog.clear()
        cache_module._check_release(version)
        assert caplog.messages[0].startswith(f"transformers {version} has not been tried with kvcache; 5.21 to 5.24")


def test_next_use_hints_reach_manager():
    cache = PrefixCache(model_of(), num_blocks=8)
    ids = prompt_of(40)
    cached(cache, ids, new=1)
    # Blocks of a prompt stay while others come and go, because blocks that ended leave first.
    for seed in range(1, 5):
        cached(cache, prompt_of(40, seed), new=1, next_use="end")
    assert cache.load(ids)[1] == 32
    check_idle(cache)


@pytest.mark.parametrize("method", ["load", "store", "generate", "hint"])
def test_invalid_next_use_stores_nothing(cache, method):
    more = [cache.new_past()] if method == "store" else []
    with pytest.raises(ValueError, match=r"next_use must be one of 'end', 'soon', 'later', got 'never'"):
        getattr(cache, method)(IDS, *more, next_use="never")
    assert cache.stats().blocks.stored_blocks == 0
