"""The part of a fingerprint that a model's folder decides, compared with a directory before an engine starts.

Needs no vLLM. Only a start resolves the rest: dtypes, layouts, and defaults and overrides of the model's configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcache.epoch import WEIGHTS, Epoch, EpochKind
from kvcache.integrations.vllm.weights import digest_of_files

# Formats whose loader reads the weights from the model's folder.
_FORMATS_OF_FOLDER = (
    *("auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt"),
    *("runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
)
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# A folder may have other weights in each format. vLLM prefers the first pattern, unless `load_format` is one of these.
_OF_FORMAT = {"pt": ("*.pt",), "npcache": ("*.bin", "*.pt"), "mistral": ("consolidated*.safetensors",)}
_OF_FORMAT |= dict.fromkeys(("sharded_state", "runai_streamer_sharded"), ("model-rank-*.safetensors",))


def weight_files(model: Path, load_format: str) -> list[Path]:
    """Return the weights that `load_format` reads of a model's file or folder; [] if it reads them elsewhere."""
    if load_format not in _FORMATS_OF_FOLDER or model.is_file():
        return [model] if load_format in _FORMATS_OF_FOLDER else []
    patterns = _OF_FORMAT.get(load_format, _WEIGHT_FILES)
    files = next((found for pattern in patterns if (found := sorted(model.glob(pattern)))), [])
    others = [path for path in files if not path.name.startswith("consolidated")]
    # Only "auto" prefers Mistral's own files to those of Hugging Face.
    return files if load_format in ("auto", "mistral") or not others else others


def digest_of_texts(paths: Iterable[Path]) -> str:
    """Return a digest of the names and contents of small files, or "" without a file."""
    texts = sorted((path.name.encode(), path.read_bytes()) for path in paths if path.is_file())
    digest = hashlib.sha256(b"".join(b"%b %d\0%b" % (name, len(text), text) for name, text in texts))
    return f"sha256:{digest.hexdigest()[:32]}" if texts else ""


def compare_folder(
    folder: Path, load_format: str, stored: Mapping[str, Any], version: str | int | None
) -> Iterator[tuple[str, str]]:
    """Yield levels and texts: whether a start with the model in `folder` takes the blocks of the fingerprint `stored`.

    `load_format` and `version`, that of the weights, are options of the start.
    """
    known, files = {"engine": "vllm"}, weight_files(folder, load_format)
    if files:  # a whole model, not only its config.json
        known["processor"] = digest_of_texts(folder.glob("*processor_config.json"))
    epoch = Epoch.of(stored)
    if version is not None or epoch.kind != EpochKind.FINGERPRINT:
        known[WEIGHTS] = epoch.weights
        if version is None or epoch != Epoch.of_version(version):
            yield "warning", f"has blocks of the weights {epoch.weights!r}, and a start with these options finds none"
    elif files and epoch.name.startswith("sha256:"):
        # The start may read another format, or a single file.
        others = {tuple(weight_files(folder, other)) for other in _FORMATS_OF_FOLDER}
        others |= {(path,) for path in folder.glob("*.gguf")}
        digest = digest_of_files(files)
        if digest == epoch.name or epoch.name not in map(digest_of_files, map(list, others)):
            known[WEIGHTS] = digest
    for name, value in known.items():
        if stored.get(name, "") != value:
            change = f"{stored.get(name)!r} is not {value!r}"
            yield "error", f"was written by other {name}: {change}; choose another directory, or delete this one"
    config, fields = json.loads((folder / "config.json").read_text(encoding="utf-8")), stored.get("config", {})
    equal = {name for name, value in fields.items() if name in config and config[name] == value}
    # vLLM and transformers rewrite texts, flags and lists; an option may replace numbers, too.
    numbers = {name for name in fields.keys() - equal if {type(fields[name]), type(config.get(name))} <= {int, float}}
    if numbers:
        changes = ", ".join(f"{name} {fields[name]} is not {config[name]}" for name in sorted(numbers))
        yield "warning", f"was written with another configuration, which only hf_overrides may undo: {changes}"
    names = stored.keys() - known.keys() - {"config"} | {f"config.{name}" for name in fields.keys() - equal - numbers}
    yield "ok", f"has {len(equal)} fields of this config.json; only a start compares {', '.join(sorted(names))}"
