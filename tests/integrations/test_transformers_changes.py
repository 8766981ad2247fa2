"""Ways to change a model between two prompts: the second prompt's tokens are those of the changed model.

Some ways show in the fingerprint, in samples of the tensors or in the rows of embeddings, and the blocks are not
found. If a way does not, the end of the hit is computed again, compared and rejected.
"""

import functools
import logging
from unittest.mock import Mock

import pytest
import torch
import transformers
from small_models import built, cached, check_answer, check_idle, padded, plain, prompt_of
from transformers.models.llama import modeling_llama

from kvcache.integrations.transformers import PrefixCache
from kvcache.integrations.transformers.layout import CACHE_ARGUMENT

IDS = prompt_of(60)
FIRST = int(IDS[0, 0])
# More numbers in each table of embeddings or experts than are compared one by one.
SIZES_OF = {
    "rows": {"vocab_size": 512},
    "positions": {"kind": "gpt2", "vocab_size": 512},
    "experts": {"kind": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
}


def attention(model):
    return model.model.layers[0].self_attn


class LowRank(torch.nn.Module):
    """A projection with adapters, as peft's layers are: their scaling stands in a dict."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base
        self.lora_a, self.lora_b = torch.nn.ModuleDict(), torch.nn.ModuleDict()
        for name in ("one", "two"):
            self.lora_a[name] = torch.nn.Linear(base.in_features, rank, bias=False)
            self.lora_b[name] = torch.nn.Linear(rank, base.out_features, bias=False)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        self.scaling = {"one": 1.0, "two": 1.0}
        self._active_adapter = ["one"]
        self._disable_adapters = False

    def forward(self, x):
        result = self.base_layer(x)
        if not self._disable_adapters:
            for name in self._active_adapter:
                result = result + self.lora_b[name](self.lora_a[name](x)) * self.scaling[name]
        return result


class Packed(torch.nn.Module):
    """A projection whose int8 weights torch does not see, as packed kernels keep them."""

    def __init__(self, linear):
        super().__init__()
        self.out_features = linear.out_features
        scale = linear.weight.detach().abs().max() / 127
        self.packed = {"weight": (linear.weight.detach() / scale).round().to(torch.int8), "scale": scale}

    def forward(self, x):
        return x @ (self.packed["weight"].float() * self.packed["scale"]).T


class Gain(torch.nn.Module):
    """A layer, or a hook with a state, that scales its input or the output before it."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, *values):
        return values[-1] * self.factor


def replace(model, name, change):
    """Replace the submodule `name` of the first layer's attention."""
    setattr(attention(model), name, change(getattr(attention(model), name)))


def scale_behind_autograd(model):
    attention(model).k_proj.weight.data.mul_(1.1)


def swap_layers(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def patch_instance_forward(model):
    original = attention(model).k_proj.forward
    attention(model).k_proj.forward = lambda x: original(x) * 1.1


@torch.inference_mode()
def scale_in_inference_mode(model):
    attention(model).k_proj.weight.mul_(1.1)


def k_proj(model):
    return attention(model).k_proj


def q_proj(model):
    return attention(model).q_proj


def embeddings(model):
    return model.model.embed_tokens.weight.data


def experts(model):
    return model.model.layers[0].mlp.experts


def set_attribute(path, value):
    """Return a function that sets an attribute of a submodule of the model."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, value)


GLOBAL = {"gain": 1.0}
# The changes, by kind of model.
CHANGES = {
    "plain": {
        "parameter replaced": lambda model: setattr(
            k_proj(model), "weight", torch.nn.Parameter(k_proj(model).weight * 1.1)
        ),
        "data of a parameter replaced": lambda model: setattr(
            k_proj(model).weight, "data", k_proj(model).weight.detach() * 1.1
        ),
        "data scaled behind autograd": scale_behind_autograd,
        "layers swapped": swap_layers,
        "other weights loaded": lambda model: model.load_state_dict(built(seed=1).state_dict()),
        # Of a token that stands at the prompt's start only.
        "one embedding": lambda model: model.model.embed_tokens.weight[int(IDS[0, 0])].add_(1.0),
        "forward of an instance": patch_instance_forward,
        "module wrapped": lambda model: replace(model, "v_proj", lambda old: torch.nn.Sequential(old, Gain(1.1))),
        "quantized": lambda model: replace(model, "k_proj", Packed),
        "attention's scaling": set_attribute("model.layers.0.self_attn.scaling", 0.5),
        "epsilon of a norm": set_attribute("model.layers.1.input_layernorm.variance_epsilon", 0.1),
        "epsilon in the config": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        "frequencies in place": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
        "frequencies replaced": lambda model: setattr(
            model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 2
        ),
        "another dtype and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
        "an activation": set_attribute("model.layers.0.mlp.act_fn", torch.nn.Tanh()),
        "a layer's feed-forward": set_attribute("model.layers.0.mlp", Gain(0.5)),
        "a hook": lambda model: k_proj(model).register_forward_hook(Gain(1.1)),
        "a hook before": lambda model: k_proj(model).register_forward_pre_hook(lambda _, args: (args[0] * 1.1,)),
    },
    # Large tables, changed where the last block of a hit does not look, and torch notices nothing.
    "rows": {
        "one number of an embedding": lambda model: embeddings(model)[FIRST, 5].add_(2.0),
        "embedding scaled by a little": lambda model: embeddings(model)[FIRST].mul_(1.01),
        "embedding of a later token": lambda model: embeddings(model)[int(IDS[0, 20])].neg_(),
        "embeddings swapped": lambda model: embeddings(model).__setitem__(
            IDS[0, :2], embeddings(model)[IDS[0, :2].flip(0)]
        ),
        "embeddings rounded": lambda model: embeddings(model).copy_(embeddings(model).to(torch.float16)),
        "state dict assigned": lambda model: model.load_state_dict(
            built(seed=1, vocab_size=512).state_dict(), assign=True
        ),
        "one number of a norm": lambda model: model.model.layers[1].input_layernorm.weight.data[7].add_(3.0),
        "data of a buffer": lambda model: model.model.rotary_emb.inv_freq.data[2:].mul_(1.5),
        "adapter merged": lambda model: q_proj(model).weight.data.add_(torch.randn(64, 2) @ torch.randn(2, 64)),
        "row of a projection": lambda model: k_proj(model).weight.data[3].zero_(),
        "column of a projection": lambda model: model.model.layers[0].mlp.down_proj.weight.data[:, 7].mul_(9.0),
        "output head": lambda model: model.lm_head.weight.data.neg_(),
    },
    "positions": {
        "embedding of a position": lambda model: model.transformer.wpe.weight.data[3].add_(1.0),
        "one number of a position": lambda model: model.transformer.wpe.weight.data[3, 5].add_(3.0),
        "embedding of a token and position": lambda model: model.transformer.wte.weight.data[FIRST].neg_(),
        "bias of a projection": lambda model: model.transformer.h[0].attn.c_attn.bias.data[70].add_(3.0),
        "bias of a norm": lambda model: model.transformer.h[1].ln_1.bias.data.add_(0.5),
    },
    "experts": {
        **{f"expert {i} scaled": lambda model, i=i: experts(model).gate_up_proj.data[i].mul_(1.3) for i in (0, 3, 7)},
        "experts swapped": lambda model: (
            experts(model).down_proj.data[:2].copy_(experts(model).down_proj.data[:2].flip(0))
        ),
        "row of an expert": lambda model: experts(model).down_proj.data[2, 9].add_(2.0),
        "row of a router": lambda model: model.model.layers[0].mlp.gate.weight.data[1].mul_(2.0),
    },
    "hook": {
        "state of a hook": lambda model: setattr(model.hook, "factor", 1.2),
        "hook removed": lambda model: k_proj(model)._forward_hooks.clear(),
    },
    "lora": {
        "scaling of an adapter by a little": lambda model: q_proj(model).scaling.update(one=1.05),
        "scaling dict replaced": lambda model: setattr(q_proj(model), "scaling", {"one": 3.0}),
        "another adapter": lambda model: setattr(q_proj(model), "_active_adapter", ["two"]),
        "adapters disabled": lambda model: setattr(q_proj(model), "_disable_adapters", True),
        "weights of an adapter": lambda model: q_proj(model).lora_b["one"].weight.data.mul_(2),
        "adapter removed": lambda model: replace(model, "q_proj", lambda old: old.base_layer),
    },
    "packed": {
        "packed weights": lambda model: k_proj(model).packed["weight"].neg_(),
        "scale of packed weights": lambda model: k_proj(model).packed["scale"].mul_(1.1),
    },
    "inference": {"inference tensor in place": scale_in_inference_mode},
    "patched": {
        "function of the module patched": "apply_rotary_pos_emb",
        "forward of a class patched": "LlamaAttention.forward",
        "forward of a norm's class patched": "LlamaRMSNorm.forward",
        "forward of a shared class patched": "LlamaMLP.forward",
    },
    "context": {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)},
    "global": {"weights in a global": None},
    "patched torch": {"torch's linear patched": None},
}
CASES = [(kind, name) for kind, changes in CHANGES.items() for name in changes]


def prepared(kind):
    """Return a model for changes of this kind."""
    if kind == "inference":
        with torch.inference_mode():
            return built()
    model = built(**SIZES_OF.get(kind, {}))
    if kind == "lora":
        replace(model, "q_proj", LowRank)
    elif kind == "hook":
        # Not a submodule.
        model.__dict__["hook"] = Gain(1.0)
        k_proj(model).register_forward_hook(model.hook)
    elif kind == "packed":
        replace(model, "k_proj", Packed)
    elif kind == "global":
        k_proj(model).register_forward_hook(lambda module, args, output: output * GLOBAL["gain"])
    return model.eval()


def patch_scaled(monkeypatch, path):
    """Let a function or method of the Llama module return tensors scaled by 1.1."""
    owner, _, name = path.rpartition(".")
    owner = getattr(modeling_llama, owner) if owner else modeling_llama
    original = getattr(owner, name)

    def scaled(value):
        return value * 1.1 if isinstance(value, torch.Tensor) else value

    def patched(*args, **kwargs):
        out = original(*args, **kwargs)
        return tuple(map(scaled, out)) if isinstance(out, tuple) else scaled(out)

    monkeypatch.setattr(owner, name, patched)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*case, marks=[pytest.mark.slow] if i % 5 else [], id=case[1]) for i, case in enumerate(CASES)],
)
def test_generate_after_change_uses_changed_model(kind, name, monkeypatch):
    change = CHANGES[kind][name]
    model = prepared(kind)
    cache = PrefixCache(model, num_blocks=64)
    if kind == "rows":
        # The embeddings are in another tensor than at the start.
        model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    stale = cached(cache, IDS, new=8)
    assert torch.equal(cached(cache, IDS, new=8), stale)
    assert (cache.stats().loaded_tokens, cache.stats().rejected_hits) == (32, 0)
    context = torch.no_grad()
    if kind == "patched":
        patch_scaled(monkeypatch, change)
    elif kind == "patched torch":
        linear = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linear(*args) * 1.1)
    elif kind == "global":
        monkeypatch.setitem(GLOBAL, "gain", 1.1)
    elif kind == "context":
        context = change()
    else:
        with torch.no_grad():
            change(model)
    with context:
        if kind == "context" and CACHE_ARGUMENT == "cache":
            # From 5.24 on, autocast computes keys in another dtype than before.
            with pytest.raises(ValueError, match="make another PrefixCache for it"):
                cached(cache, IDS, new=8)
            cache = PrefixCache(model, num_blocks=64)
        expected = check_answer(cache, IDS, new=8)
        check_answer(cache, IDS, new=8)
        past, n = cache.load(IDS)
        assert n == 48
        assert model(IDS[:, n:], **{CACHE_ARGUMENT: past}).logits[0, -1].argmax() == expected[0, 60]
    assert cache.stats().loaded_tokens >= 2 * 32


def change_unseen(model, factor=1.1):
    """Change the state of a hook, which neither torch nor the fingerprint sees."""
    model.hook.factor *= factor


@pytest.fixture
def model():
    return prepared("hook")


@pytest.fixture
def cache(model):
    return PrefixCache(model, num_blocks=64)


def test_hidden_change_hides_old_blocks(model, cache):
    cached(cache, IDS)
    change_unseen(model)
    past, n = cache.load(IDS)
    assert (n, past.get_seq_length(), cache.stats().rejected_hits, cache.stats().loaded_tokens) == (0, 0, 1, 0)
    with torch.no_grad():
        model(IDS, **{CACHE_ARGUMENT: past})
    assert cache.store(IDS, past) == 3
    assert cache.load(IDS)[1] == 48


def test_rejected_batch_hits_warn_once(model, cache, caplog):
    ids, mask = padded(70, 53)
    cached(cache, ids, mask)
    with caplog.at_level(logging.WARNING, "kvcache"):
        for _ in range(2):
            change_unseen(model)
            check_answer(cache, ids, mask)
    assert cache.stats().rejected_hits == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaForCausalLM no longer computes the keys and values that were stored" in caplog.text


def test_block_of_other_model_begins_nothing(model, cache):
    # The hit of one block saves nothing, yet it is compared: later blocks would follow it.
    cached(cache, IDS[:, :17])
    change_unseen(model)
    for _ in range(2):
        check_answer(cache, IDS)
    assert cache.stats().rejected_hits == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_reject_only_changes(dtype):
    model = prepared("hook").to(dtype)
    cache = PrefixCache(model, num_blocks=256)
    for seed in range(4):
        cached(cache, prompt_of(60, seed))
        cached(cache, torch.cat([prompt_of(60, seed), prompt_of(9, seed)], dim=1))
    assert cache.stats().rejected_hits == 0
    assert cache.stats().loaded_tokens == 4 * 32
    change_unseen(model, 1.5)
    cached(cache, IDS)
    assert cache.stats().rejected_hits == 1


def test_padding_counted_by_model_changes_keys():
    # TrOCR's decoder: positions run on from the cache's first column, padding or not.
    torch.manual_seed(0)
    config = transformers.TrOCRConfig(
        vocab_size=199, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, init_std=0.2,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    config.is_encoder_decoder = False
    cache = PrefixCache(transformers.TrOCRForCausalLM(config).eval(), num_blocks=64)
    ids, mask = padded(70, 53)
    for num_rows in (1, 2, 2):
        check_answer(cache, ids[:num_rows], mask[:num_rows])
    assert cache.load(ids, mask)[1] == 64
    assert cache.stats().rejected_hits == 0


def test_verify_off_notices_changed_numbers():
    model = built(vocab_size=512)
    cache = PrefixCache(model, num_blocks=64, verify=False)
    for column in range(8):
        cached(cache, IDS, new=1)
        assert cache.load(IDS)[1] == 48
        # In place, or in memory that takes the place of the tensor's.
        data = model.lm_head.weight.data.clone() if column % 2 else model.lm_head.weight
        with torch.no_grad():
            data[5, column].add_(1.0)
        model.lm_head.weight.data = data.data
        assert cache.load(IDS)[1] == 0
    named = PrefixCache(model, num_blocks=64, verify=False, fingerprint="org/model@1")
    cached(named, IDS, new=1)
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(1.5)
    assert named.load(IDS)[1] == 0
    for options in ([None, 1.0], [None, 2.0]):
        model.options = options
        assert named.load(IDS)[1] == 0
        cached(named, IDS, new=1)


def test_cast_model_is_refused_at_once(model, cache):
    cached(cache, IDS)
    model.to(torch.bfloat16)
    message = "were torch.float32 on cpu at the start and are torch.bfloat16 on cpu now: make another PrefixCache"
    generate = model.generate
    model.generate = Mock(side_effect=AssertionError("the model computes"))
    for method in (cache.load, functools.partial(cached, cache)):
        with pytest.raises(ValueError, match=message):
            method(IDS)
    check_idle(cache)
    model.generate = generate
    model.to(torch.float32)
    check_answer(cache, IDS)


def test_cast_part_with_layout_is_served(model, cache):
    cached(cache, IDS)
    model.lm_head.to(torch.float64)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    check_answer(cache, IDS)
    assert cache.load(IDS)[1] == 48


def test_quantized_model_is_refused_unless_unverified():
    class Dynamic(torch.nn.Linear):
        """The input is rounded by the largest value of all tokens that are computed together."""

        def forward(self, x):
            scale = x.abs().max() / 127
            return super().forward((x / scale).round() * scale)

    model = built()
    for layer in model.model.layers:
        layer.self_attn.k_proj.__class__ = Dynamic
    with pytest.raises(ValueError, match=r"if other tokens are computed with it, as .* verify=False reuses blocks"):
        PrefixCache(model, num_blocks=8)
    cache = PrefixCache(model, num_blocks=8, verify=False)
    cached(cache, IDS)
    assert cache.load(IDS)[1] == 48


@pytest.mark.parametrize("seen", [True, False])
def test_one_differing_token_rejects_hit(model, cache, seen):
    # Of the block that is computed again; in a model without experts rounding explains no such token.
    cached(cache, IDS, new=1)
    states = cache._layout._view(cache._pool.tensor, cache._layout.pieces[-1])
    blocks = [i for i in range(len(states)) if states[i].any()]
    assert len(blocks) == 3
    states[blocks[-1 if seen else 0], :, 5] += 1.0
    assert cache.load(IDS)[1] == (0 if seen else 48)
    assert cache.stats().rejected_hits == int(seen)


def test_nan_in_stored_block_rejects_hit(model, cache):
    expected = plain(model, IDS)
    cached(cache, IDS)
    cache._pool.tensor.view(torch.float32).fill_(torch.nan)
    assert torch.equal(cached(cache, IDS), expected)
    assert cache.stats().rejected_hits == 1
