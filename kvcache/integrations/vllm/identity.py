"""What identifies an engine's KV data: the fingerprint that its tiers and shared stores are opened with.

A tier outlives its engine, and vLLM's block keys cover token ids and raw images only. So everything else that decides a
block's bytes is part of the fingerprint: the weights, the code and the processor of the model, the resolved
configuration, and how a block is laid out. The release of vLLM is not part of it, so an upgrade keeps stored blocks.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvcache.assembly.assemble import TierSettings
from kvcache.epoch import WEIGHTS, Epoch
from kvcache.integrations.vllm.weights import cache_path, digest_of_files

# vLLM's log configuration covers loggers below its own name only.
logger = init_logger(f"vllm.{__name__}")

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
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


def fingerprint(config: Any, vllm_config: Any = None, weights_version: str | int | None = None) -> dict[str, Any]:
    """Return what distinguishes an engine's blocks from those of another model, configuration or geometry.

    `config` is vLLM's OffloadingConfig. Without a `vllm_config`, the model is known by its name only, with a warning.
    `weights_version` takes the place of the digest of the weight files.
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
            # The blocks hold the keys and values of its layers, too.
            model["draft"] = _plain(_model_of(draft, vllm_config.load_config))
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
    identity = fingerprint(spec.config, vllm_config, weights_version)
    # Of one rank; FileMapper knows whether the ranks matter.
    del identity["parallel"], identity["bytes_per_block"]
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    return {**identity, "chunk": mapper.get_run_config(), "bytes_per_chunk": getattr(spec, "kv_bytes_per_chunk", 0)}


def engine_config() -> Any:
    """Return the `VllmConfig` of the engine that is making a spec, or None.

    vLLM hands a spec a summary without the overrides, and sets its current configuration in workers only. In the
    scheduler the connector that makes the spec has it: a local variable of a caller.
    """
    frame = inspect.currentframe()
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if hasattr(config, "model_config"):
            return config
        frame = frame.f_back
    return get_current_vllm_config_or_none()


def _model_of(model_config: Any, load_config: Any, weights_version: str | int | None = None) -> dict[str, Any]:
    hf_config = _without(_NOT_OF_MODEL, model_config.hf_config.to_diff_dict())
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
    if folder is not None and (digest := _digest_of_texts(folder.glob("*processor_config.json"))):
        model["processor"] = digest
    if model["multimodal"] is not None:
        # The keys cover raw images; another release may turn them into other inputs.
        model["multimodal"]["libraries"] = _versions_of(_OF_PROCESSORS)
    if getattr(model_config, "trust_remote_code", False):
        model["code"] = _code_of(model_config, load_config, folder)
    if any(rope_type in json.dumps(hf_config, default=str) for rope_type in ("longrope", "dynamic")):
        # The rotary embedding is chosen by the longest prompt that the engine allows.
        model["max_model_len"] = model_config.max_model_len
    return model


def _weights_of(model_config: Any, load_config: Any, folder: Path | None) -> str:
    """Return a digest of the whole weight files, or the model's name and revision if they cannot be read."""
    files = [] if load_config.load_format == "dummy" else _weight_files(model_config, load_config, folder)
    if files:
        with suppress(OSError):
            return digest_of_files(files, _log_read)
    named = f"{model_config.model}@{model_config.revision}, format {load_config.load_format}, seed {model_config.seed}"
    logger.warning(
        "kvcache cannot read the weights of %s: tiers know them by this name only. Give other weights of this name "
        "a directory or a salt of their own, or a 'weights_version'",
        named,
    )
    return named


def _weight_files(model_config: Any, load_config: Any, folder: Path | None) -> list[Path]:
    path = Path(model_config.model)
    if path.is_file():
        return [path]
    # A folder may have the same weights in two formats: vLLM prefers safetensors, unless `load_format` is "pt".
    patterns = _WEIGHT_FILES[1:] if load_config.load_format == "pt" else _WEIGHT_FILES
    return next((files for pattern in patterns if folder and (files := sorted(folder.glob(pattern)))), [])


def _folder_of(model_config: Any, load_config: Any) -> Path | None:
    """Return the folder of the model's files, or None if it is unknown."""
    path = Path(model_config.model)
    if path.is_file():
        return path.parent
    return path if path.is_dir() else _snapshot(model_config.model, model_config.revision, load_config.download_dir)


def _snapshot(repository: Any, revision: str | None, cache_dir: str | None) -> Path | None:
    """Return the folder of a repository in the hub's cache, which the engine has loaded; asks no server."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # of the hub's client: the name stands for the files then
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir, local_files_only=True))
    return None


def _code_of(model_config: Any, load_config: Any, folder: Path | None) -> str:
    """Return a digest of the model's own code, which may lie in other repositories: ``"owner/name--module.Class"``."""
    auto_map = getattr(model_config.hf_config, "auto_map", None) or {}
    classes = [name for value in auto_map.values() for name in (value if isinstance(value, list | tuple) else [value])]
    repositories = sorted({str(name).partition("--")[0] for name in classes if "--" in str(name)})
    revision = getattr(model_config, "code_revision", None)
    folders = [folder, *(_snapshot(name, revision, load_config.download_dir) for name in repositories)]
    return _digest_of_texts(path for place in folders if place is not None for path in place.rglob("*.py"))


def _digest_of_texts(paths: Iterable[Path]) -> str:
    """Return a digest of the names and contents of small files, or "" without a file."""
    texts = sorted((path.name.encode(), path.read_bytes()) for path in paths if path.is_file())
    digest = hashlib.sha256(b"".join(b"%b %d\0%b" % (name, len(text), text) for name, text in texts))
    return f"sha256:{digest.hexdigest()[:32]}" if texts else ""


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
    """Return those of a config's fields that are set; None without a config."""
    if config is None:
        return None
    return {name: _plain(value) for name in names if (value := getattr(config, name, None)) is not None}


def _without(names: frozenset[str], config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without these names, and without those that are None, at any depth."""
    return {
        name: _without(names, value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in names and value is not None
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, a long one as a digest."""
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
