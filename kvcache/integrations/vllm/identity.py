"""Fingerprint of an engine's KV data, with which its tiers and shared stores are opened.

A tier outlives its engine, and vLLM's block keys cover token ids and raw images only. So everything else that decides a
block's bytes is part of the fingerprint: the weights, the code and the processor of the model, the resolved
configuration, and how a block is laid out. The release of vLLM is not part of it, so an upgrade keeps stored blocks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm import ModelRegistry, envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvcache.assembly.assemble import TierSettings
from kvcache.epoch import WEIGHTS, Epoch
from kvcache.integrations.vllm.group_windows import local_of_caller
from kvcache.integrations.vllm.model_folder import digest_of_texts, weight_files
from kvcache.integrations.vllm.weights import cache_path, digest_of_files

# vLLM's log configuration covers loggers below its own name only.
logger = init_logger(f"vllm.{__name__}")

# Fields of vLLM's configuration that determine a block's bytes, and that fields of every fingerprint cover.
# tests/vllm/test_identity_fields.py lists the fields that do not, and fails if vLLM has a field in no list.
SAID = {
    "cache_config": "block_size cache_dtype hash_block_size is_attention_free kv_cache_dtype_skip_layers "
    "kv_cache_layout mamba_block_size mamba_cache_dtype mamba_page_size_padded mamba_ssm_cache_dtype "
    "prefix_match_unit skip_page_size_padded sliding_window",
    "model_config": "code_revision config_format disable_sliding_window dtype generation_config hf_config "
    "hf_config_path hf_overrides hf_text_config max_model_len model model_weights multimodal_config "
    "override_generation_config quantization quantization_config revision seed trust_remote_code",
    "parallel_config": "decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size "
    "tensor_parallel_size",
    "load_config": "load_format model_loader_extra_config",
    "lora_config": "default_mm_loras lora_dtype",
    "multimodal_config": "media_io_kwargs mm_device_do_normalize mm_encoder_attn_dtype mm_processor_kwargs "
    "video_pruning_method video_pruning_rate",
    "speculative_config": "code_revision draft_load_config draft_model_config draft_parallel_config "
    "draft_tensor_parallel_size max_model_len method model num_speculative_tokens quantization revision",
    "attention_config": "backend backend_per_kind",
    "vllm_config": "quant_config",
}
# Fields that are part of a fingerprint only if their value is not listed here. Earlier fingerprints implied the listed
# values, so engines with them keep their directories and names in stores. "envs" has environment variables.
IMPLIED: dict[str, dict[str, tuple[Any, ...]]] = {
    "cache_config": {
        "use_replayssm": (False,), "replayssm_buffer_len": (16,), "use_kda_recoverssm": (False,),
        "swa_bounded_replay": (True,),
    },
    "model_config": {"model_impl": ("auto",), "model_class_overrides": ({},)},
    "parallel_config": {"cp_kv_cache_interleave_size": (1,), "dcp_kv_cache_interleave_size": (1,)},
    "load_config": {"ignore_patterns": (["original/**/*"], "original/**/*")},
    "lora_config": {
        "target_modules": (None,), "enable_tower_connector_lora": (False,), "enable_mixed_moe_lora_format": (False,),
        "enable_moe_shared_loras": (False,),
    },
    "multimodal_config": {"mm_encoder_fp8_scale_path": (None,)},
    "speculative_config": {
        "kv_cache_dtype": (None,), "parallel_drafting": (False,), "use_heterogeneous_vocab": (False,),
    },
    "attention_config": {"indexer_kv_dtype": ("auto",), "use_non_causal": (False,), "hisparse_config": (None,)},
    "vllm_config": {"additional_config": ({},)},
    "envs": {
        "VLLM_SSM_CONV_STATE_LAYOUT": (None, "SD"), "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": (False,),
        "VLLM_PP_LAYER_PARTITION": (None,), "VLLM_USE_V2_MODEL_RUNNER": (None,), "VLLM_MLA_DISABLE": (False,),
        "VLLM_CPU_INT4_W4A8": (True,), "VLLM_MARLIN_INPUT_DTYPE": (None,), "VLLM_VIDEO_LOADER_BACKEND": ("opencv",),
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG": (None,), "VLLM_HUMMING_INPUT_QUANT_CONFIG": (None,),
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": ("NONE",), "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": ("",),
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("",),
    },
}  # fmt: skip
# Fields of a Hugging Face config that describe its origin or text generation, not the computation.
_NOT_OF_MODEL = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"}
    | {f"{kind}_token_id" for kind in ("bos", "eos", "pad")}
)
_OF_MULTIMODAL = ("media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_processor_kwargs")
_OF_VIDEO = ("video_pruning_rate", "video_pruning_method")
# Libraries that turn an image or a video into the input of the model.
_OF_PROCESSORS = ("transformers", "pillow", "pillow-simd", "torchvision", "torchcodec", "opencv-python-headless")
_OF_LORA = ("default_mm_loras", "lora_dtype")
_MAX_TEXT = 200
_LOGGED_READ_BYTES = 1 << 30


def check_readable(vllm_config: Any, tiers: Iterable[TierSettings]) -> None:
    """Raise ValueError if vLLM's configuration is unknown: then only a salt keeps blocks of different models apart."""
    if vllm_config is None and not all(getattr(tier.options, "salt", "") for tier in tiers):
        raise ValueError(
            "kvcache cannot read the configuration of this release of vLLM, so tiers would know blocks by the model's "
            "name only: leave out 'tiers', or use stores with a 'salt' of this model and these weights"
        )


def fingerprint(
    config: Any, vllm_config: Any = None, weights_version: str | int | None = None, caches: list[Any] | None = None
) -> dict[str, Any]:
    """Return what distinguishes an engine's blocks from those of another model, configuration or geometry.

    `config` is vLLM's OffloadingConfig. Without a `vllm_config`, log a warning and name the model only.
    `weights_version` replaces the digest of the weight files. `caches` is the result of `group_caches`.
    """
    parallel = config.parallel
    if vllm_config is None:
        logger.warning("kvcache cannot read vLLM's configuration: blocks in tiers are known by the model's name only")
        model: dict[str, Any] = {"name": config.model.name}
    else:
        model = _model_of(vllm_config.model_config, vllm_config.load_config, weights_version)
        model["kv_skip_layers"] = _plain(getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", []))
        model["lora"] = _some(vllm_config.lora_config, _OF_LORA)
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        if draft is not None and draft is not vllm_config.model_config:
            # Blocks also hold the keys and values of the draft model's layers.
            load_config = getattr(vllm_config.speculative_config, "draft_load_config", None)
            model["draft"] = _plain(_model_of(draft, load_config or vllm_config.load_config))
        model |= _unusual(vllm_config) | _formats_of(config, vllm_config, caches or group_caches(config))
    if weights_version is not None:
        model[WEIGHTS] = Epoch.of_version(weights_version).weights
    return {
        "engine": "vllm",
        "device": current_platform.device_type,
        **model,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
    }


def chunk_fingerprint(spec: Any, vllm_config: Any, weights_version: str | int | None = None) -> dict[str, Any]:
    """Return what distinguishes the rows of host memory under vLLM's own manager, which the OffloadingSpec `spec` owns.

    The layout is that of vLLM's files: engines of another parallel topology share blocks if their bytes are equal.
    """
    identity = fingerprint(spec.config, vllm_config, weights_version, getattr(spec, "group_caches", None))
    # Both depend on the ranks; FileMapper decides whether the ranks matter.
    del identity["parallel"], identity["bytes_per_block"]
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    return {**identity, "chunk": mapper.get_run_config(), "bytes_per_chunk": getattr(spec, "kv_bytes_per_chunk", 0)}


def engine_config() -> Any:
    """Return the `VllmConfig` of the engine that is making a spec, or None.

    vLLM gives a spec a summary without the overrides, and sets its current configuration in workers only. In the
    scheduler, the configuration is a local variable of the connector that makes the spec.
    """
    config = local_of_caller("vllm_config", "model_config")
    return get_current_vllm_config_or_none() if config is None else config


def group_caches(config: Any) -> list[Any]:
    """Return vLLM's spec of the caches of each group in its OffloadingConfig `config`, as the scheduler has it.

    Without a connector among the callers, return an empty list.
    """
    caches = local_of_caller("kv_cache_config", "kv_cache_groups")
    specs = [caches.kv_cache_groups[group.group_id].kv_cache_spec for group in config.groups] if caches else []
    # A worker has the specs of all layers of a group, the scheduler has the first one.
    return [getattr(spec, "first_spec", spec) for spec in specs]


def _unusual(vllm_config: Any) -> dict[str, Any]:
    """Return the fields of `IMPLIED` that have another value."""
    configs = {name: getattr(vllm_config, name, None) for name in IMPLIED}
    configs |= {"multimodal_config": vllm_config.model_config.multimodal_config}
    configs |= {"vllm_config": vllm_config, "envs": envs}
    unusual: dict[str, Any] = {
        f"{name}.{field}": _plain(value)
        for name, config in configs.items()
        for field, implied in IMPLIED[name].items()
        if config is not None and (value := getattr(config, field, implied[0])) not in implied
    }
    model_config = vllm_config.model_config
    architecture, overrides = getattr(model_config, "architecture", ""), getattr(model_config, "hf_overrides", None)
    registered = ModelRegistry.models.get(architecture)
    module = getattr(getattr(registered, "model_cls", None), "__module__", getattr(registered, "module_name", "vllm."))
    if not module.startswith("vllm.") or callable(overrides) or "architectures" in (overrides or {}):
        # A plug-in or an override has chosen the class that computes with these weights.
        unusual["model_class"] = [architecture, module]
    return unusual


def _formats_of(config: Any, vllm_config: Any, caches: list[Any]) -> dict[str, Any]:
    """Return the formats of the groups that `dtype` and `layout` do not describe."""
    formats: dict[str, Any] = {}
    usual = str(STR_DTYPE_TO_TORCH_DTYPE.get(config.model.dtype, config.model.dtype))
    # A recurrent state has several tensors.
    of_groups = [getattr(cache, "dtypes", None) or [getattr(cache, "dtype", usual)] for cache in caches]
    dtypes = [[str(dtype) for dtype in of_group] for of_group in of_groups]
    if any(set(names) != {usual} for names in dtypes):
        formats["dtypes"] = [[name.removeprefix("torch.") for name in names] for names in dtypes]
    speculative = vllm_config.speculative_config
    if speculative is not None and any(hasattr(cache, "dtypes") for cache in caches):
        # A state also has room for drafts. It is padded to the size of attention, so its size does not show them.
        formats["state_tokens"] = speculative.num_speculative_tokens
    if current_platform.is_cpu():
        from vllm.v1.attention.backends import cpu_attn

        # vLLM orders keys and values by the instructions that the CPU has.
        dtype, choose = vllm_config.model_config.dtype, cpu_attn._get_attn_isa  # noqa: SLF001
        kinds = [
            choose(dtype, cache.block_size, cache.head_size, config.model.dtype)
            for cache in caches
            if hasattr(cache, "head_size") and not vllm_config.model_config.use_mla
        ]
        if not {"vec", "vec16"}.issuperset(kinds):
            formats["packing"] = kinds
        return formats
    layout = config.kv_cache_layout or ""
    if current_platform.is_rocm() or 0 <= layout.find("H") < layout.find("N"):
        # On ROCm, attention backends order keys differently; others choose how many tokens of a head are adjacent.
        attention = vllm_config.attention_config
        if attention.backend is not None or attention.backend_per_kind:
            formats["packing"] = [str(attention.backend), _plain(attention.backend_per_kind)]
    if current_platform.is_fp8_fnuz() and config.model.dtype.startswith("fp8"):
        formats["fp8"] = "fnuz"
    return formats


def _model_of(model_config: Any, load_config: Any, weights_version: str | int | None = None) -> dict[str, Any]:
    try:
        hf_config = model_config.hf_config.to_diff_dict()
    except Exception:  # a class that cannot be built without arguments, such as EAGLE's
        hf_config = model_config.hf_config.to_dict()
    hf_config = _without(_NOT_OF_MODEL, hf_config)
    folder = _folder_of(model_config, load_config)
    model: dict[str, Any] = {
        "quantization": [model_config.quantization, _plain(getattr(model_config, "quantization_config", None))],
        "compute_dtype": str(model_config.dtype),
        "sliding_window": not model_config.disable_sliding_window,
        "multimodal": _some(model_config.multimodal_config, _OF_MULTIMODAL + _OF_VIDEO),
        "config": {name: _plain(value) for name, value in sorted(hf_config.items())},
    }
    if weights_version is None:
        model[WEIGHTS] = _weights_of(model_config, load_config, folder)
    if folder is not None and (digest := digest_of_texts(folder.glob("*processor_config.json"))):
        model["processor"] = digest
    if model["multimodal"] is not None:
        # Keys cover raw images; another release of a library may turn them into other inputs.
        model["multimodal"]["libraries"] = _versions_of(_OF_PROCESSORS)
    if getattr(model_config, "trust_remote_code", False):
        model["code"] = _code_of(model_config, load_config, folder)
    text = json.dumps(hf_config, default=str)
    if "attn_temperature_tuning" in text:
        # Llama 4 scales its queries by this field, which its class in vLLM replaces while it loads.
        generation = {**model_config.try_get_generation_config(), **model_config.override_generation_config}
        if not generation.get("attn_temperature_tuning", model_config.max_model_len > 32768):
            model["attn_temperature_tuning"] = False
    if any(rope_type in text for rope_type in ("longrope", "dynamic")):
        # The rotary embedding is chosen by the longest prompt that the engine allows.
        model["max_model_len"] = model_config.max_model_len
    return model


def _weights_of(model_config: Any, load_config: Any, folder: Path | None) -> str:
    """Return a digest of the whole weight files, or the model's name and revision if they cannot be read."""
    path = Path(model_config.model)
    place = path if path.is_file() else folder
    if place is not None and (files := weight_files(place, load_config.load_format)):
        with suppress(OSError):
            return digest_of_files(files, _log_read)
    named = f"{model_config.model}@{model_config.revision}, format {load_config.load_format}, seed {model_config.seed}"
    if extra := getattr(load_config, "model_loader_extra_config", None):
        named += f", {_plain(extra)}"
    logger.warning(
        "kvcache cannot read the weights of %s: tiers know them by this name only. Give other weights of this name "
        "a directory or a salt of their own, or a 'weights_version'",
        named,
    )
    return named


def _folder_of(model_config: Any, load_config: Any) -> Path | None:
    """Return the folder of the model's files, or None if it is unknown."""
    path = Path(model_config.model)
    if path.is_file():
        return path.parent
    return path if path.is_dir() else _snapshot(model_config.model, model_config.revision, load_config.download_dir)


def _snapshot(repository: Any, revision: str | None, cache_dir: str | None) -> Path | None:
    """Return the folder of a repository that the engine has loaded into the hub's cache; no server is asked."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # the hub's client may raise anything; the name then replaces the files
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir, local_files_only=True))
    return None


def _code_of(model_config: Any, load_config: Any, folder: Path | None) -> str:
    """Return a digest of the model's own code, which may lie in other repositories: ``"owner/name--module.Class"``."""
    auto_map = getattr(model_config.hf_config, "auto_map", None) or {}
    classes = [name for value in auto_map.values() for name in (value if isinstance(value, list | tuple) else [value])]
    repositories = sorted({str(name).partition("--")[0] for name in classes if "--" in str(name)})
    revision = getattr(model_config, "code_revision", None)
    folders = [folder, *(_snapshot(name, revision, load_config.download_dir) for name in repositories)]
    return digest_of_texts(path for place in folders if place is not None for path in place.rglob("*.py"))


def _versions_of(libraries: Iterable[str]) -> dict[str, str]:
    versions = {}
    for library in libraries:
        with suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return versions


def _log_read(num_bytes: int) -> None:
    if num_bytes >= _LOGGED_READ_BYTES:
        logger.info(
            "kvcache reads %.1f GiB of weights to identify them; the next start uses the digests in %s",
            num_bytes / 2**30,
            cache_path(),
        )


def _some(config: Any, names: tuple[str, ...]) -> Any:
    """Return the fields `names` of a config that are set; None without a config."""
    if config is None:
        return None
    return {name: _plain(value) for name in names if (value := getattr(config, name, None)) is not None}


def _without(names: frozenset[str], config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the fields `names`, and without those that are None, at any depth.

    A `quantization_config` keeps its fields: a "dtype" in it decides values.
    """
    return {
        name: _without(names if name != "quantization_config" else frozenset(), value)
        if isinstance(value, dict)
        else value
        for name, value in config.items()
        if name not in names and value is not None
    }


def _plain(value: Any) -> Any:
    """Return a value in types of JSON, or the digest of a long one."""
    text = json.dumps(value, sort_keys=True, default=_named)
    if len(text) > _MAX_TEXT:
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return json.loads(text)


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
