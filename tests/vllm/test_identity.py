"""The fingerprint of an engine's tiers: it changes with the keys and values, and with nothing else."""

import copy
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.transformers_utils.configs.extract_hidden_states import ExtractHiddenStatesConfig

from kvcache.integrations.vllm import identity
from kvcache.integrations.vllm.identity import check_readable, fingerprint
from kvcache.tiers.shared_store import Namespace

BF16, F16 = torch.bfloat16, torch.float16
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LARGER_CHUNKS = SimpleNamespace(blocks_per_chunk=2, tokens_per_hash=8)
INTERLEAVED = "parallel_config.cp_kv_cache_interleave_size"
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def llama_config(num_hidden_layers=2, **changes):
    return LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=num_hidden_layers, **changes)


def model_config(folder, **changes):
    fields = {
        "model": str(folder),
        "revision": None,
        "seed": 0,
        "dtype": torch.float32,
        "quantization": None,
        "quantization_config": None,
        "disable_sliding_window": False,
        "max_model_len": 2048,
        "multimodal_config": None,
        "use_mla": False,
        "hf_config": llama_config(),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return write_weights(tmp_path / "model", seed=0)


def write_weights(folder, seed):
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    for i in range(2):
        save_file({f"layer.{i}.weight": torch.randn(64, 64)}, folder / f"model-{i}.safetensors")
    return folder


def taken(model, of_blocks=None, weights_version=None, caches=None, **of_engine):
    """Return the fingerprint of an engine of one group on one rank; without a model, of an unknown engine."""
    config = SimpleNamespace(
        model=SimpleNamespace(name="name", dtype="float32"),
        kv_cache_layout="LBHNC",
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer",))],
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        worker_kv_bytes_per_block=4096,
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
    )
    vars(config).update(of_blocks or {})
    fields = {
        "model_config": model,
        "load_config": SimpleNamespace(load_format="auto", download_dir=None),
        "cache_config": SimpleNamespace(kv_cache_dtype_skip_layers=[]),
        "lora_config": None,
        "speculative_config": None,
    }
    found = fingerprint(config, model and SimpleNamespace(**{**fields, **of_engine}), weights_version, caches)
    assert json.loads(json.dumps(found)) == found
    return found


def differing(one, other):
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    ("of_model", "of_engine", "of_blocks", "fields"),
    [
        ({"dtype": torch.bfloat16}, {}, {}, "compute_dtype"),
        ({"quantization": "fp8"}, {}, {}, "quantization"),
        ({"quantization_config": {"linear": "int8"}}, {}, {}, "quantization"),
        ({"disable_sliding_window": True}, {}, {}, "sliding_window"),
        ({"multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})}, {}, {}, "multimodal"),
        ({"hf_config": llama_config(num_hidden_layers=3)}, {}, {}, "config"),
        ({"hf_config": llama_config(rope_parameters=YARN)}, {}, {}, "config"),
        ({}, {"cache_config": SimpleNamespace(kv_cache_dtype_skip_layers=["0"])}, {}, "kv_skip_layers"),
        ({}, {"lora_config": SimpleNamespace(lora_dtype=torch.float16, default_mm_loras=None)}, {}, "lora"),
        ({}, {}, {"kv_cache_layout": "NHD"}, "layout"),
        ({}, {}, {"model": SimpleNamespace(name="name", dtype="fp8")}, "dtype"),
        ({}, {}, {"groups": [SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer", "2"))]}, "groups"),
        ({}, {}, {"cache": LARGER_CHUNKS}, "blocks_per_chunk tokens_per_hash"),
        ({}, {}, {"worker_kv_bytes_per_block": 8192}, "bytes_per_block"),
        ({"model_impl": "transformers"}, {}, {}, "model_config.model_impl"),
        ({}, {"attention_config": SimpleNamespace(indexer_kv_dtype="mxfp4")}, {}, "attention_config.indexer_kv_dtype"),
        ({}, {"parallel_config": SimpleNamespace(cp_kv_cache_interleave_size=16)}, {}, INTERLEAVED),
        ({}, {"speculative_config": SimpleNamespace(kv_cache_dtype="fp8")}, {}, "speculative_config.kv_cache_dtype"),
        ({}, {"additional_config": {"kv_nz": True}}, {}, "vllm_config.additional_config"),
    ],
)
def test_fingerprint_changes_with_each_setting(folder, of_model, of_engine, of_blocks, fields):
    found = taken(model_config(folder, **of_model), of_blocks, **of_engine)
    assert differing(taken(model_config(folder)), found) == {*fields.split()}


def test_plain_fingerprint_keeps_its_name(folder):
    """Directories and stores of the first kvcache that had tiers are found again: the name was recorded then."""
    config = SimpleNamespace(to_diff_dict=lambda: {"model_type": "llama", "hidden_size": 64})
    found = taken(model_config(folder, hf_config=config), caches=[cache(torch.float32)], weights_version="1")
    assert Namespace(b"store", found, 4096, "").prefix == "kvcache:2d4fa398e7b868277c5a5ec637e13b4c"


def cache(*dtypes, **fields):
    """Return vLLM's description of the cache of a group: with one dtype of attention, with more of states."""
    of_attention = {"dtype": dtypes[0], "block_size": 32, "head_size": 64}
    return SimpleNamespace(**(of_attention if len(dtypes) == 1 else {"dtypes": dtypes}), **fields)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([BF16, BF16], None),
        ([F16, BF16], [["bfloat16"], ["float16", "bfloat16"]]),
        ([BF16, F16], [["bfloat16"], ["bfloat16", "float16"]]),
        ([BF16, torch.float32], [["bfloat16"], ["bfloat16", "float32"]]),
    ],
)
def test_fingerprint_has_second_dtypes(folder, dtypes, expected):
    of_blocks = {"model": SimpleNamespace(name="name", dtype="bfloat16")}
    caches = [cache(BF16), cache(*dtypes)]
    found = taken(model_config(folder), of_blocks, caches=caches)
    assert found.get("dtypes") == expected
    # Drafts make a state longer, but not its page, which is padded to that of attention.
    drafting = [SimpleNamespace(num_speculative_tokens=n) for n in (1, 2)]
    names = [taken(model_config(folder), of_blocks, caches=caches, speculative_config=each) for each in drafting]
    assert differing(*names) == {"state_tokens"}


def test_fingerprint_dtypes_of_quantized_caches(folder):
    of_blocks = {"model": SimpleNamespace(name="name", dtype="fp8")}
    assert "dtypes" not in taken(model_config(folder), of_blocks, caches=[cache(torch.uint8)])
    # Layers that are skipped have the model's dtype.
    found = taken(model_config(folder), of_blocks, caches=[cache(torch.uint8), cache(BF16)])
    assert found["dtypes"] == [["uint8"], ["bfloat16"]]


@pytest.mark.parametrize("has_amx", [False, True])
def test_fingerprint_has_packing_of_cpu(folder, monkeypatch, has_amx):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(identity.current_platform, "is_cpu", lambda: True)
    of_blocks = {"model": SimpleNamespace(name="name", dtype="bfloat16")}
    found = taken(model_config(folder, dtype=BF16), of_blocks, caches=[cache(BF16), cache(BF16, BF16)])
    assert found.get("packing") == (["amx"] if has_amx else None)
    assert "packing" not in taken(model_config(folder), caches=[cache(torch.float32)])
    latent = model_config(folder, dtype=BF16, use_mla=True)
    assert "packing" not in taken(latent, of_blocks, caches=[cache(BF16)])


@pytest.mark.parametrize(("layout", "is_rocm", "has_packing"), [
    ("LBHNC", False, True), ("BHLNC", False, True), ("LBNHC", False, False), ("LBNHC", True, True), (None, False, False)
])  # fmt: skip
def test_fingerprint_has_packing_of_backend(folder, monkeypatch, layout, is_rocm, has_packing):
    for name, answer in {"is_cpu": False, "is_rocm": is_rocm, "is_fp8_fnuz": is_rocm}.items():
        monkeypatch.setattr(identity.current_platform, name, lambda answer=answer: answer)
    of_blocks = {"kv_cache_layout": layout, "model": SimpleNamespace(name="name", dtype="fp8")}
    chosen = [SimpleNamespace(backend=backend, backend_per_kind={}) for backend in (None, "FLASHINFER")]
    auto, named = (taken(model_config(folder), of_blocks, attention_config=each) for each in chosen)
    assert differing(auto, named) == ({"packing"} if has_packing else set())
    assert auto.get("fp8") == ("fnuz" if is_rocm else None)


@pytest.mark.parametrize(
    ("variable", "value"), [("VLLM_SSM_CONV_STATE_LAYOUT", "DS"), ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")]
)
def test_fingerprint_has_layout_of_environment(folder, monkeypatch, variable, value):
    plain = taken(model_config(folder))
    monkeypatch.setenv(variable, value)
    assert differing(taken(model_config(folder)), plain) == {f"envs.{variable}"}


@pytest.mark.parametrize("make", [
    lambda: EAGLEConfig(llama_config(architectures=["A"])),
    lambda: EAGLEConfig(llama_config(architectures=["A"]), method="eagle3"),
    lambda: ExtractHiddenStatesConfig(llama_config()),
])  # fmt: skip
def test_fingerprint_draft_without_defaults(folder, make):
    model, drafts = model_config(folder), [make(), make()]
    drafts[1].hidden_act = "relu"
    names = [
        taken(model, speculative_config=SimpleNamespace(draft_model_config=model_config(folder, hf_config=draft)))
        for draft in (drafts[0], make(), drafts[1])
    ]
    assert names[0] == names[1]
    assert differing(names[0], names[2]) == {"draft"}


@pytest.mark.parametrize("field", ["lora_dtype", "default_mm_loras"])
def test_fingerprint_differs_by_lora(folder, field):
    loras = [SimpleNamespace(**{field: value}) for value in ("one", "two")]
    assert differing(*[taken(model_config(folder), lora_config=lora) for lora in loras]) == {"lora"}


def test_fingerprint_draft_model_is_part(folder, tmp_path):
    drafts = [model_config(write_weights(tmp_path / f"draft{seed}", seed)) for seed in (1, 2)]
    model = model_config(folder)
    found = [taken(model, speculative_config=SimpleNamespace(draft_model_config=draft)) for draft in drafts]
    assert differing(*found) == {"draft"}
    assert "draft" not in taken(model)


def test_fingerprint_differs_by_weights(folder, tmp_path):
    before = taken(model_config(folder))
    assert taken(model_config(write_weights(tmp_path / "copy", seed=0))) == before
    assert differing(taken(model_config(write_weights(tmp_path / "tuned", seed=1))), before) == {"weights"}
    write_weights(folder, seed=1)
    assert differing(taken(model_config(folder)), before) == {"weights"}


@pytest.mark.parametrize("row", [8, 65_000])
def test_fingerprint_row_edited_in_place_differs(tmp_path, row):
    # Rows of 1 KiB in 64 MiB, between samples of 4 KiB every 16 KiB.
    path = tmp_path / "model.safetensors"
    save_file({"embedding": torch.ones(65_536, 256)}, path)
    before = taken(model_config(tmp_path))
    times, start = path.stat(), path.stat().st_size - (64 << 20)
    with path.open("r+b") as file:
        file.seek(start + row * 1024)
        file.write(bytes(1024))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert differing(taken(model_config(tmp_path)), before) == {"weights"}


@pytest.mark.parametrize(
    ("load_format", "name", "is_read"),
    [
        ("auto", "model.bin", False),
        ("npcache", "model.bin", True),
        ("pt", "model.pt", True),
        ("pt", "model.bin", False),
        ("mistral", "consolidated.safetensors", True),
        ("mistral", "model-0.safetensors", False),
        ("hf", "consolidated.safetensors", False),
        ("auto", "consolidated.safetensors", True),
        ("sharded_state", "model-rank-0-part-0.safetensors", True),
        ("sharded_state", "model-0.safetensors", False),
    ],
)
def test_fingerprint_has_weights_of_format(folder, load_format, name, is_read):
    """A folder may have other weights in each format that vLLM's loader reads."""
    load_config = SimpleNamespace(load_format=load_format, download_dir=None)
    for other in ("a.bin", "a.pt", "consolidated.safetensors", "model-rank-0-part-0.safetensors"):
        (folder / other).write_bytes(b"other")
    names = []
    for text in (b"one", b"two"):
        (folder / name).write_bytes(text)
        names.append(taken(model_config(folder), load_config=load_config))
    assert differing(*names) == ({"weights"} if is_read else set())


@pytest.mark.parametrize("overrides", [{"architectures": ["LlamaForCausalLM"]}, lambda config: config, None])
def test_fingerprint_has_chosen_class(folder, monkeypatch, overrides):
    model = model_config(folder, architecture="LlamaForCausalLM", hf_overrides={"rope_theta": 1})
    assert differing(taken(model), taken(model_config(folder))) == set()
    model.hf_overrides = overrides
    if overrides is None:
        (registry := identity.ModelRegistry.models.copy())["LlamaForCausalLM"] = SimpleNamespace(module_name="plugin")
        monkeypatch.setattr(identity.ModelRegistry, "models", registry)
    assert differing(taken(model), taken(model_config(folder))) == {"model_class"}


def test_fingerprint_omits_text_generation_settings(folder):
    config = llama_config(eos_token_id=7)
    config.transformers_version, config._name_or_path = "9.9", "elsewhere"
    changed = model_config(folder, hf_config=config, max_model_len=1024, seed=5)
    assert taken(changed) == taken(model_config(folder))


@pytest.mark.parametrize("rope", [LONG, DYNAMIC])
def test_fingerprint_counts_length_for_some_ropes(folder, rope):
    config = llama_config()
    config.rope_parameters = rope
    found = [taken(model_config(folder, hf_config=config, max_model_len=n)) for n in (1024, 2048)]
    assert differing(*found) == {"max_model_len"}


@pytest.mark.parametrize(
    ("length", "stored", "given", "is_tuned"),
    [(40_000, {}, {}, True), (2048, {}, {}, False), (2048, {}, {"attn_temperature_tuning": True}, True),
     (40_000, {"attn_temperature_tuning": False}, {}, False)],
)  # fmt: skip
def test_fingerprint_has_scale_of_queries(folder, length, stored, given, is_tuned):
    """As vLLM's class of Llama 4 chooses it: by the longest prompt, unless the generation config says so."""
    changes = {
        "max_model_len": length,
        "override_generation_config": given,
        "try_get_generation_config": lambda: stored,
    }
    model = model_config(folder, hf_config=llama_config(attn_temperature_tuning=True), **changes)
    assert taken(model).get("attn_temperature_tuning") == (None if is_tuned else False)


def test_fingerprint_has_dtypes_of_quantization(folder):
    configs = [llama_config(quantization_config={"input_tensors": {"dtype": dtype}}) for dtype in ("fp8_e4m3", "int8")]
    assert differing(*[taken(model_config(folder, hf_config=config)) for config in configs]) == {"config"}


@pytest.mark.parametrize("case", ["dummy", "hub", "no config"])
def test_fingerprint_unreadable_weights_warns(folder, case, monkeypatch):
    warnings = []
    monkeypatch.setattr(identity.logger, "warning", lambda text, *values: warnings.append(text % values))
    load_config = SimpleNamespace(load_format="dummy" if case == "dummy" else "auto", download_dir=str(folder))
    model = model_config(folder) if case == "dummy" else model_config(Path("org/none"), revision="1")
    found = taken(None if case == "no config" else model, load_config=load_config)
    assert ("by the model's name only" if case == "no config" else "by this name only") in warnings[0]
    if case == "hub":
        assert found["weights"] == "org/none@1, format auto, seed 0"
        other = copy.copy(model)
        other.revision = "2"
        assert differing(taken(other, load_config=load_config), found) == {"weights"}


def test_fingerprint_named_weights_read_no_file(folder, monkeypatch):
    before = taken(model_config(folder))
    monkeypatch.setattr(identity, "digest_of_files", lambda *args: 1 / 0)
    found = [taken(model_config(folder), weights_version=version) for version in ("7", 7, "8")]
    assert found[0] == found[1] == {**before, "weights": "version:7"}
    assert differing(found[0], found[2]) == {"weights"}


def test_fingerprint_processor_and_code_count(folder, monkeypatch):
    before = taken(model_config(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling.py").write_text("x = 1")
    assert taken(model_config(folder)) == before
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"image_mean": [0.5]}))
        found = taken(model_config(folder))
        assert differing(found, before) == {"processor"}
        before = found
    trusting = taken(model_config(folder, trust_remote_code=True))
    assert differing(trusting, before) == {"code"}
    (folder / "layers").mkdir()
    (folder / "layers" / "mlp.py").write_text("x = 1")
    assert differing(taken(model_config(folder, trust_remote_code=True)), trusting) == {"code"}


def test_fingerprint_code_of_other_repository_counts(folder, tmp_path, monkeypatch):
    other = tmp_path / "snapshot"
    other.mkdir()
    (other / "modeling.py").write_text("x = 1")
    asked = []

    def snapshot(repository, revision, cache_dir):
        asked.append((repository, revision))
        return other

    monkeypatch.setattr(identity, "_snapshot", snapshot)
    config = llama_config()
    config.auto_map = {"AutoModel": "org/code--modeling.Model", "AutoConfig": "configuration.Config"}
    model = model_config(folder, hf_config=config, trust_remote_code=True, code_revision="r1")
    before = taken(model)
    (other / "modeling.py").write_text("x = 2")
    assert differing(taken(model), before) == {"code"}
    assert asked == [("org/code", "r1")] * 2


def test_fingerprint_libraries_of_images_count(folder, monkeypatch):
    multimodal = model_config(folder, multimodal_config=SimpleNamespace())
    before = {kind: taken(model) for kind, model in (("text", model_config(folder)), ("images", multimodal))}
    assert before["images"]["multimodal"]["libraries"]["transformers"]
    monkeypatch.setattr(identity.metadata, "version", lambda name: "99")
    assert taken(model_config(folder)) == before["text"]
    assert differing(taken(multimodal), before["images"]) == {"multimodal"}


@pytest.mark.parametrize(("options", "is_refused"), [
    ([SimpleNamespace(path="/kv")], True),
    ([SimpleNamespace(salt="")], True),
    ([SimpleNamespace(salt="secret"), SimpleNamespace(path="/kv")], True),
    ([SimpleNamespace(salt="secret")], False),
    ([], False),
])  # fmt: skip
def test_tiers_of_unknown_engine_are_refused(options, is_refused):
    tiers = [SimpleNamespace(options=one) for one in options]
    with pytest.raises(ValueError, match="model's name only") if is_refused else nullcontext():
        check_readable(None, tiers)
    check_readable(SimpleNamespace(), tiers)
