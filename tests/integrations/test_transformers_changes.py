"""Ways to change a model between two prompts: the second prompt's tokens are those of the changed model.

Some ways show in the fingerprint, and the blocks are not found. If a way does not, the end of the hit is computed
again, compared and rejected.
"""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from kvcache.integrations.transformers import PrefixCache

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that the next token depends on the whole context.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}


def built(model_type="llama", **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **changes})).eval()


def draw(length, seed=0):
    return torch.randint(2, 199, (1, length), generator=torch.Generator().manual_seed(seed))


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
        self.scaling = {"one": 1.0, "two": 1.0}
        self._active_adapter = ["one"]
        self._disable_adapters = False

    def forward(self, x):
        result = self.base_layer(x)
        if not self._disable_adapters:
            for name in self._active_adapter:
                result = result + self.lora_b[name](self.lora_a[name](x)) * self.scaling[name]
        return result


class Scaled:
    """A hook with a state."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, args, output):
        return output * self.factor


class Packed(torch.nn.Module):
    """A projection whose int8 weights torch does not see, as packed kernels keep them."""

    def __init__(self, linear):
        super().__init__()
        self.out_features = linear.out_features
        scale = linear.weight.detach().abs().max() / 127
        self.packed = {"weight": (linear.weight.detach() / scale).round().to(torch.int8), "scale": scale}

    def forward(self, x):
        return x @ (self.packed["weight"].float() * self.packed["scale"]).T


@torch.no_grad()
def scale_in_place(model):
    attention(model).k_proj.weight.mul_(1.1)


def replace_parameter(model):
    attention(model).k_proj.weight = torch.nn.Parameter(attention(model).k_proj.weight.detach() * 1.1)


def replace_data(model):
    attention(model).k_proj.weight.data = attention(model).k_proj.weight.detach() * 1.1


def scale_behind_autograd(model):
    attention(model).k_proj.weight.data.mul_(1.1)


def write_through_numpy(model):
    attention(model).v_proj.weight.detach().numpy()[:] *= 1.1


@torch.no_grad()
def swap_layers(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


@torch.no_grad()
def load_other_weights(model):
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(model.config)
    model.load_state_dict(other.state_dict())


@torch.no_grad()
def change_one_embedding(model):
    # Of a token that stands at the prompt's start only.
    model.model.embed_tokens.weight[int(draw(60)[0, 0])] += 1.0


def step_of_an_optimizer(model):
    model(draw(8)).logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def patch_instance_forward(model):
    original = attention(model).k_proj.forward
    attention(model).k_proj.forward = lambda x: original(x) * 1.1


def patch_module_call(model):
    original = attention(model).v_proj
    attention(model).v_proj = torch.nn.Sequential(original, torch.nn.Dropout(0.0), Gain(1.1)).eval()


class Gain(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def set_attribute(path, value):
    def change(model):
        *parents, name = path.split(".")
        owner = model.get_submodule(".".join(parents))
        setattr(owner, name, value)

    return change


def change_config(**values):
    return lambda model: [setattr(model.config, name, value) for name, value in values.items()]


def change_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def double_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(2)


def replace_frequencies(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2


def to_half(model):
    model.to(torch.bfloat16)


def prune_a_head(model):
    with torch.no_grad():
        attention(model).o_proj.weight[:, :16] = 0


def inference_tensor_in_place(model):
    with torch.inference_mode():
        attention(model).k_proj.weight.mul_(1.1)


def quantize(model):
    attention(model).k_proj = Packed(attention(model).k_proj)


def repack(model):
    attention(model).k_proj.packed["weight"].neg_()


def rescale_packed(model):
    attention(model).k_proj.packed["scale"] *= 1.1


CHANGES = {
    "weights scaled in place": ("plain", scale_in_place),
    "parameter replaced": ("plain", replace_parameter),
    "data of a parameter replaced": ("plain", replace_data),
    "data scaled behind autograd": ("plain", scale_behind_autograd),
    "weights written through numpy": ("plain", write_through_numpy),
    "layers swapped": ("plain", swap_layers),
    "other weights loaded": ("plain", load_other_weights),
    "one embedding": ("plain", change_one_embedding),
    "a step of an optimizer": ("plain", step_of_an_optimizer),
    "heads zeroed": ("plain", prune_a_head),
    "forward of an instance": ("plain", patch_instance_forward),
    "module wrapped": ("plain", patch_module_call),
    "quantized": ("plain", quantize),
    "attention's scaling": ("plain", set_attribute("model.layers.0.self_attn.scaling", 0.5)),
    "epsilon of a norm": ("plain", change_epsilon),
    "epsilon in the config": ("plain", change_config(rms_norm_eps=0.1)),
    "frequencies in place": ("plain", double_frequencies),
    "frequencies replaced": ("plain", replace_frequencies),
    "rope's attention scaling": ("plain", set_attribute("model.rotary_emb.attention_scaling", 1.5)),
    "another dtype and back": ("plain", lambda model: (to_half(model), model.to(torch.float32))),
    "an activation": ("plain", set_attribute("model.layers.0.mlp.act_fn", torch.nn.Tanh())),
    "a layer's feed-forward": ("plain", lambda model: setattr(model.model.layers[0], "mlp", Gain(0.5))),
    "a hook": ("plain", lambda model: attention(model).k_proj.register_forward_hook(Scaled(1.1))),
    "a hook before": (
        "plain",
        lambda model: attention(model).k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,)),
    ),
    "state of a hook": ("hook", lambda model: setattr(model.hook, "factor", 1.2)),
    "hook removed": ("hook", lambda model: attention(model).k_proj._forward_hooks.clear()),
    "scaling of an adapter": ("lora", lambda model: attention(model).q_proj.scaling.update(one=2.0)),
    "scaling of an adapter by a little": ("lora", lambda model: attention(model).q_proj.scaling.update(one=1.05)),
    "scaling dict replaced": ("lora", lambda model: setattr(attention(model).q_proj, "scaling", {"one": 3.0})),
    "another adapter": ("lora", lambda model: setattr(attention(model).q_proj, "_active_adapter", ["two"])),
    "both adapters": ("lora", lambda model: attention(model).q_proj._active_adapter.append("two")),
    "adapters disabled": ("lora", lambda model: setattr(attention(model).q_proj, "_disable_adapters", True)),
    "weights of an adapter": (
        "lora",
        lambda model: attention(model).q_proj.lora_b["one"].weight.data.mul_(2),
    ),
    "adapter removed": ("lora", lambda model: setattr(attention(model), "q_proj", attention(model).q_proj.base_layer)),
    "packed weights": ("packed", repack),
    "scale of packed weights": ("packed", rescale_packed),
    "inference tensor in place": ("inference", inference_tensor_in_place),
    "function of the module patched": ("patched", "apply_rotary_pos_emb"),
    "forward of a class patched": ("patched", "LlamaAttention.forward"),
    "forward of a norm's class patched": ("patched", "LlamaRMSNorm.forward"),
    "forward of a shared class patched": ("patched", "LlamaMLP.forward"),
    "autocast": ("context", lambda: torch.autocast("cpu", torch.bfloat16)),
    "weights in a global": ("global", None),
    "torch's linear patched": ("patched torch", None),
}


GLOBAL = {"gain": 1.0}


def prepared(kind):
    if kind == "inference":
        with torch.inference_mode():
            return built()
    model = built()
    if kind == "lora":
        attention(model).q_proj = LowRank(attention(model).q_proj)
        with torch.no_grad():
            for parameter in attention(model).q_proj.parameters():
                parameter.normal_(std=0.2)
        return model.eval()
    if kind == "hook":
        model.__dict__["hook"] = Scaled(1.0)
        attention(model).k_proj.register_forward_hook(model.hook)
    elif kind == "packed":
        quantize(model)
    elif kind == "global":
        attention(model).k_proj.register_forward_hook(lambda module, args, output: output * GLOBAL["gain"])
    return model


def answer(run, ids, **kwargs):
    return run(ids, max_new_tokens=8, do_sample=False, **kwargs)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if i % 5 else []) for i, case in enumerate(CHANGES)]
)
def test_generate_after_change_gives_tokens_of_changed_model(case, monkeypatch):
    kind, change = CHANGES[case]
    model = prepared(kind)
    cache = PrefixCache(model, num_blocks=64)
    ids = draw(60)
    stale = answer(cache.generate, ids)
    assert torch.equal(answer(cache.generate, ids), stale)
    assert (cache.stats().loaded_tokens, cache.stats().rejected_hits) == (32, 0)
    context = torch.no_grad()
    if kind == "patched":
        owner, _, name = change.rpartition(".")
        owner = getattr(modeling_llama, owner) if owner else modeling_llama
        original = getattr(owner, name)

        def patched(*args, **kwargs):
            out = original(*args, **kwargs)
            return tuple(map(scaled, out)) if isinstance(out, tuple) else scaled(out)

        def scaled(value):
            return value * 1.1 if isinstance(value, torch.Tensor) else value

        monkeypatch.setattr(owner, name, patched)
    elif kind == "patched torch":
        linear = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linear(*args) * 1.1)
    elif kind == "global":
        monkeypatch.setitem(GLOBAL, "gain", 1.1)
    elif kind == "context":
        context = change()
    else:
        change(model)
    with context:
        expected = answer(model.generate, ids, attention_mask=torch.ones_like(ids))
        for _ in range(2):
            assert torch.equal(answer(cache.generate, ids), expected)
        past, n = cache.load(ids)
        assert n == 48
        assert model(ids[:, n:], past_key_values=past).logits[0, -1].argmax() == expected[0, 60]
    assert cache.stats().loaded_tokens >= 2 * 32


def test_load_after_hidden_change_finds_nothing_then_the_new_blocks():
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    ids = draw(60)
    answer(cache.generate, ids)
    scale_behind_autograd(model)
    past, n = cache.load(ids)
    assert (n, past.get_seq_length(), cache.stats().rejected_hits, cache.stats().loaded_tokens) == (0, 0, 1, 0)
    with torch.no_grad():
        model(ids, past_key_values=past)
    assert cache.store(ids, past) == 3
    assert cache.load(ids)[1] == 48


def test_rejected_hits_are_counted_and_warned_about_once(caplog):
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    ids = draw(60)
    answer(cache.generate, ids)
    with caplog.at_level(logging.WARNING, "kvcache"):
        for _ in range(2):
            scale_behind_autograd(model)
            answer(cache.generate, ids)
    assert cache.stats().rejected_hits == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaForCausalLM no longer computes the keys and values that were stored" in caplog.text


def test_rejected_hit_streams_and_samples_as_without_a_cache():
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    ids = draw(60)
    answer(cache.generate, ids)
    scale_behind_autograd(model)
    streamed = []

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            streamed.append(value.flatten().tolist())

        def end(self):
            streamed.append("end")

    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 50, "output_logits": True}
    options["return_dict_in_generate"] = True
    outputs = []
    for run, more in ((model.generate, {"attention_mask": torch.ones_like(ids)}), (cache.generate, {})):
        torch.manual_seed(3)
        streamed.clear()
        outputs.append(run(input_ids=ids, streamer=Streamer(), **options, **more))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(torch.equal(*pair) for pair in zip(outputs[0].logits, outputs[1].logits, strict=True))
    assert streamed == [ids[0].tolist(), *[[token] for token in outputs[0].sequences[0, 60:].tolist()], "end"]
    assert cache.stats().rejected_hits == 1


def test_batch_with_padding_rejects_hit_of_changed_model():
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    ids, mask = draw(70).repeat(2, 1), torch.ones(2, 70, dtype=torch.long)
    ids[1, 17:], mask[1, :17] = draw(53, seed=1)[0], 0
    answer(cache.generate, ids, attention_mask=mask)
    for _ in range(2):
        scale_behind_autograd(model)
        expected = answer(model.generate, ids, attention_mask=mask)
        assert torch.equal(answer(cache.generate, ids, attention_mask=mask), expected)
    assert cache.stats().rejected_hits == 2


def test_one_block_stored_by_another_model_never_begins_a_longer_prefix():
    # The hit of one block saves nothing, yet it is compared: later blocks would follow it.
    model = built()
    cache = PrefixCache(model, num_blocks=64)
    ids = draw(60)
    answer(cache.generate, ids[:, :17])
    scale_behind_autograd(model)
    expected = answer(model.generate, ids, attention_mask=torch.ones_like(ids))
    for _ in range(2):
        assert torch.equal(answer(cache.generate, ids), expected)
    assert cache.stats().rejected_hits == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_reject_a_change_and_nothing_else(dtype):
    model = built().to(dtype)
    cache = PrefixCache(model, num_blocks=256)
    for seed in range(4):
        answer(cache.generate, draw(60, seed))
        answer(cache.generate, torch.cat([draw(60, seed), draw(9, seed)], dim=1))
    assert cache.stats().rejected_hits == 0
    assert cache.stats().loaded_tokens == 4 * 32
    attention(model).k_proj.weight.data.mul_(1.5)
    answer(cache.generate, draw(60))
    assert cache.stats().rejected_hits == 1


def test_model_whose_positions_count_padding_gets_keys_by_padding():
    # TrOCR's decoder: positions run on from the cache's first column, padding or not.
    torch.manual_seed(0)
    config = transformers.TrOCRConfig(
        vocab_size=199, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, init_std=0.2,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    config.is_encoder_decoder = False
    model = transformers.TrOCRForCausalLM(config).eval()
    cache = PrefixCache(model, num_blocks=64)
    ids, mask = torch.zeros(2, 70, dtype=torch.long), torch.ones(2, 70, dtype=torch.long)
    ids[0], ids[1, 17:], mask[1, :17] = draw(70)[0], draw(70)[0, :53], 0
    for one, of_one in ((ids[:1], mask[:1]), (ids, mask), (ids, mask)):
        expected = answer(model.generate, one, attention_mask=of_one)
        assert torch.equal(answer(cache.generate, one, attention_mask=of_one), expected)
    assert cache.load(ids, mask)[1] == 64
    assert cache.stats().rejected_hits == 0


def test_verify_off_computes_nothing_again():
    model = built()
    cache = PrefixCache(model, num_blocks=64, verify=False)
    ids = draw(60)
    expected = answer(cache.generate, ids)
    assert torch.equal(answer(cache.generate, ids), expected)
    assert cache.stats().loaded_tokens == 48
    assert cache.stats().loaded_tokens == 48
    scale_behind_autograd(model)
    assert cache.load(ids)[1] == 48
