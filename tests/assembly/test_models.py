"""Models by name and by their config.json: the bytes of a token, and what is assumed of layers."""

import json

import pytest

from kvcache.assembly.models import Model, model_names, model_of


def test_models_weigh_what_their_shapes_say():
    llama = model_of("llama-3.1-8b")
    assert llama.token_bytes == 2 * 32 * 8 * 128 * 2 == 131072
    assert model_of("llama-3.1-8b", "fp8").token_bytes == 65536
    assert model_of("deepseek-v3").token_bytes == 61 * 576 * 2
    assert llama.saved_s(1000) == 2 * 8e9 * 1000 / 4e14
    assert Model("own", 2, 256).saved_s(1000) is None
    assert len(model_names()) >= 20
    assert all(model_of(name).token_bytes > 0 for name in model_names())


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ],
)
def test_name_of_the_hub_is_known(name, short):
    assert model_of(name) == model_of(short)


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"hidden_size": 4096, "intermediate_size": 14336}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (LLAMA, 131072),
        ({"text_config": LLAMA}, 131072),
        (LLAMA | {"head_dim": 64}, 65536),
        (LLAMA | {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 32768),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}, 70272),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 36864),
    ],
)
def test_config_of_model_gives_shape(tmp_path, config, token_bytes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_of(str(path)).token_bytes == model_of(str(tmp_path)).token_bytes == token_bytes


def test_config_counts_sliding_and_recurrent_layers(tmp_path):
    path = tmp_path / "config.json"
    kinds = ["linear_attention"] * 4 + ["sliding_attention"] * 3 + ["full_attention"]
    path.write_text(json.dumps(LLAMA | {"num_hidden_layers": 8, "layer_types": kinds}))
    model = model_of(str(path))
    assert (model.num_layers, model.sliding_layers, model.recurrent_layers) == (4, 3, 4)
    assert model.layer_note == "3 sliding layers, counted in full; 4 recurrent layers, not counted"


def test_config_of_model_gives_parameters(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert model_of(str(path)).num_params == pytest.approx(7.0e9, rel=0.01)
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 512}
    path.write_text(json.dumps(LLAMA | experts))
    assert model_of(str(path)).num_params == pytest.approx(2.35e9, rel=0.01)
    path.write_text(json.dumps(LLAMA | {"num_hidden_layers": "32"}))
    with pytest.raises(ValueError, match="must hold a positive int 'num_hidden_layers', got '32'"):
        model_of(str(path))
