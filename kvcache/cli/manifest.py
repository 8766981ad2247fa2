"""Check the pods of a Kubernetes manifest against the configurations of kvcache in it; no cluster is needed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from kvcache.cli.findings import Finding
from kvcache.integrations.vllm import settings as vllm
from kvcache.options import OptionError, format_size, parse_size

_ARGUMENT = "--kv-transfer-config"
_WORKLOADS = ("Pod", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")
# What containerd and Docker mount at /dev/shm without being asked.
_DEFAULT_SHM_BYTES = 64 << 20
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([KMGTPE]i|[kMGTPE]|)")
_UNITS = {"": 1, **{unit: 1000**i for i, unit in enumerate("kMGTPE", 1)}}
_UNITS |= {f"{unit}i": 1024**i for i, unit in enumerate("KMGTPE", 1)}


@dataclass(slots=True)
class _Manifest:
    """What the checks of one pod read from other objects of the file."""

    config_maps: dict[str, Mapping[str, str]] = field(default_factory=dict)
    claim_bytes: dict[str, int] = field(default_factory=dict)
    workloads: list[Mapping[str, Any]] = field(default_factory=list)
    # Directory of a disk tier, by volume and path in it: the pods that open it.
    owners: dict[tuple[str, str], list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Volume:
    kind: str  # as in the manifest: "emptyDir", "persistentVolumeClaim", ...; "volumeClaimTemplate" for one per pod
    source: Mapping[str, Any]
    place: str  # the directory in the volume
    is_per_pod: bool


def check_manifest(path: Path) -> list[Finding]:
    """Check every container of a manifest whose arguments have a `--kv-transfer-config`.

    Raises
    ------
    ValueError
        The file cannot be read, is not YAML, is not a manifest of Kubernetes, or has no such container.
    """
    import yaml

    try:
        documents = [part for part in yaml.safe_load_all(path.read_text(encoding="utf-8")) if part is not None]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    findings: list[Finding] = []
    try:
        manifest = _read(documents)
        for workload in manifest.workloads:
            findings += _check_workload(workload, manifest)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a valid manifest: {type(error).__name__}: {error}") from error
    if not findings:
        raise ValueError(f"no container in {path} has the argument {_ARGUMENT}")
    for (volume, place), pods in manifest.owners.items():
        if len(pods) > 1:
            text = f"{volume}, directory {place}, belongs to one engine, and {', '.join(pods)} open it"
            findings.append(Finding("error", "volumes", text))
    return findings


def _read(documents: list[Mapping[str, Any]]) -> _Manifest:
    manifest = _Manifest()
    for document in documents:
        kind = document["kind"]
        if kind == "List":
            documents += document["items"]
        elif kind == "ConfigMap":
            manifest.config_maps[document["metadata"]["name"]] = document.get("data") or {}
        elif kind == "PersistentVolumeClaim":
            storage = document["spec"]["resources"]["requests"]["storage"]
            manifest.claim_bytes[document["metadata"]["name"]] = _quantity(storage)
        elif kind in _WORKLOADS:
            manifest.workloads.append(document)
    return manifest


def _check_workload(workload: Mapping[str, Any], manifest: _Manifest) -> Iterator[Finding]:
    name = f"{workload['kind']}/{workload['metadata']['name']}"
    pod = workload["spec"] if workload["kind"] == "Pod" else workload["spec"]["template"]["spec"]
    for container in pod["containers"]:
        text = _argument(container, manifest)
        if text is None:
            continue
        subject = f"{name}, {container['name']}"
        # A container that cannot be read does not hide the faults of the next one.
        try:
            placement, folder, unknown = _placement(text)
        except ValueError as error:
            problems = error.problems if isinstance(error, OptionError) else [str(error)]
            yield from (Finding("error", subject, problem) for problem in problems)
            continue
        if unknown:
            yield Finding("warning", subject, f"unknown keys of {vllm.WHERE}: {unknown}")
        settings = placement.settings
        pool_bytes = settings.cpu_bytes_to_use or 0
        yield Finding("ok", subject, f"a pool of {format_size(pool_bytes)}, policy {placement.policy}")
        yield _check_limit(f"{subject}: memory", container, pool_bytes)
        yield _check_memlock(f"{subject}: pinned memory", container, pool_bytes)
        if settings.tiers:
            yield _check_shm(f"{subject}: shared memory", _volume(folder, container, workload), folder, pool_bytes)
        for tier in settings.tiers:
            options = tier.of_rank("0").options.arguments()
            if "path" in options and "capacity" in options:
                capacity_bytes = parse_size("capacity", options["capacity"])
                volume = _volume(options["path"], container, workload)
                tier_subject = f"{subject}: tier {tier.cls.__name__}"
                yield _check_tier(tier_subject, volume, options["path"], capacity_bytes, manifest)
                if volume is not None and not volume.is_per_pod:
                    owners = manifest.owners.setdefault((_named(volume), volume.place), [])
                    owners += _pods(name, workload, volume.kind)


def _argument(container: Mapping[str, Any], manifest: _Manifest) -> str | None:
    """Return the JSON text after `--kv-transfer-config`, with Kubernetes' ``$(NAME)`` replaced; None without one."""
    words: list[str] = []
    for word in [*(container.get("command") or ()), *(container.get("args") or ())]:
        # A command line for a shell is one word here.
        words += shlex.split(word, comments=True) if f"{_ARGUMENT} " in word or f" {_ARGUMENT}=" in word else [word]
    text: str | None = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == _ARGUMENT:
            text = value if equals else following
    if text is None:
        return None
    values: dict[str, str] = {}
    for variable in container.get("envFrom") or ():
        values |= manifest.config_maps.get(variable.get("configMapRef", {}).get("name"), {})
    for variable in container.get("env") or ():
        ref = variable.get("valueFrom", {}).get("configMapKeyRef")
        text_of = variable.get("value") if ref is None else manifest.config_maps.get(ref["name"], {}).get(ref["key"])
        if text_of is not None:
            values[variable["name"]] = text_of
    return re.sub(r"\$\(([\w.-]+)\)", lambda found: values.get(found[1], found[0]), text)


def _placement(text: str) -> tuple[vllm.Placement, str, str]:
    """Return a parsed `--kv-transfer-config`, the folder of the shared blocks, and a list of unknown keys."""
    if text.startswith("$("):
        raise ValueError(
            f"{_ARGUMENT} is {text!r:.200}, which no environment variable and no ConfigMap in the file sets"
        )
    try:
        transfer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_ARGUMENT} is not JSON: {error}, got {text!r:.200}") from error
    extra = transfer.get(vllm.WHERE) if isinstance(transfer, dict) else None
    if not isinstance(extra, dict):
        raise ValueError(f"{_ARGUMENT} must be an object with {vllm.WHERE!r}, got {text!r:.200}")
    if faults := [*vllm.connector_faults(transfer), *filter(None, [vllm.spec_fault(extra)])]:
        raise OptionError(*(f"vLLM would not use kvcache: {fault}" for fault in faults))
    # The folder is one of the container, not of this machine.
    placement = vllm.read_config({key: value for key, value in extra.items() if key != "pool_folder"})
    folder = extra.get("pool_folder", placement.settings.pool_folder)
    if not isinstance(folder, str):
        raise ValueError(f"pool_folder must be text, got {folder!r}")
    return placement, folder, vllm.unknown_keys(extra)


def _check_limit(subject: str, container: Mapping[str, Any], pool_bytes: int) -> Finding:
    resources = container.get("resources") or {}
    limit = (resources.get("limits") or {}).get("memory")
    if limit is None:
        text = f"no memory limit: the node may have less than the pool's {format_size(pool_bytes)}"
        return Finding("warning", subject, text)
    rest_bytes = _quantity(limit) - pool_bytes
    if rest_bytes <= 0:
        return Finding("error", subject, f"the limit {limit} is not above the pool's {format_size(pool_bytes)}")
    return Finding("ok", subject, f"the limit {limit} leaves {format_size(rest_bytes)} beside the pool")


def _check_memlock(subject: str, container: Mapping[str, Any], pool_bytes: int) -> Finding:
    context = container.get("securityContext") or {}
    added = (context.get("capabilities") or {}).get("add") or ()
    if context.get("privileged") or {"IPC_LOCK", "CAP_IPC_LOCK", "ALL"} & set(added):
        return Finding("ok", subject, "the capability IPC_LOCK lifts the limit of memlock")
    text = f"without the capability IPC_LOCK, the runtime's limit of memlock may refuse {format_size(pool_bytes)}"
    return Finding("warning", subject, f"{text}, and copies are slower then")


def _check_shm(subject: str, volume: _Volume | None, folder: str, pool_bytes: int) -> Finding:
    needed = f"the pool takes {format_size(pool_bytes)} in {folder}"
    if volume is None:
        if pool_bytes > _DEFAULT_SHM_BYTES:
            return Finding("error", subject, f"{needed}, where no volume is mounted: the runtime gives 64 MiB")
        return Finding("ok", subject, needed)
    if volume.kind != "emptyDir" or volume.source.get("medium") != "Memory":
        return Finding("error", subject, f"{needed}: mount an emptyDir with medium Memory there, not {_named(volume)}")
    limit = volume.source.get("sizeLimit")
    if limit is not None and _quantity(limit) < pool_bytes:
        return Finding("error", subject, f"{needed}, and the volume's sizeLimit is {limit}")
    return Finding("ok", subject, f"{needed}, and the volume holds {limit or 'the memory limit'}")


def _check_tier(subject: str, volume: _Volume | None, path: str, capacity_bytes: int, manifest: _Manifest) -> Finding:
    needed = f"{format_size(capacity_bytes)} in {path}"
    if volume is None:
        text = f"{needed}: no volume is mounted there, and the blocks end with the container"
        return Finding("error", subject, text)
    if volume.kind == "emptyDir":
        medium = " in memory" if volume.source.get("medium") == "Memory" else ""
        text = f"{needed}: an emptyDir{medium} is deleted with the pod, and the blocks with it"
        return Finding("error" if medium else "warning", subject, text)
    if volume.kind == "volumeClaimTemplate":
        held = _quantity(volume.source["spec"]["resources"]["requests"]["storage"])
    else:
        held = manifest.claim_bytes.get(volume.source.get("claimName", ""), capacity_bytes)
    if held < capacity_bytes:
        return Finding("error", subject, f"{needed}: {_named(volume)} requests {format_size(held)} only")
    return Finding("ok", subject, f"{needed}: {_named(volume)}")


def _volume(path: str, container: Mapping[str, Any], workload: Mapping[str, Any]) -> _Volume | None:
    """Return the volume in which a container finds a path; None if no mount holds it."""
    target = PurePosixPath(path)
    mounts = [entry for entry in container.get("volumeMounts") or () if target.is_relative_to(entry["mountPath"])]
    if not mounts:
        return None
    mount = max(mounts, key=lambda entry: len(PurePosixPath(entry["mountPath"]).parts))
    place = PurePosixPath(mount.get("subPath", "."), target.relative_to(mount["mountPath"]))
    spec = workload["spec"]
    for template in spec.get("volumeClaimTemplates") or ():
        if template["metadata"]["name"] == mount["name"]:
            return _Volume("volumeClaimTemplate", template, str(place), True)
    for volume in (spec if workload["kind"] == "Pod" else spec["template"]["spec"]).get("volumes") or ():
        if volume["name"] == mount["name"]:
            # Without a source, a volume is an emptyDir.
            kind = next((key for key in volume if key != "name"), "emptyDir")
            is_per_pod = kind in ("emptyDir", "ephemeral") or "subPathExpr" in mount
            return _Volume(kind, volume.get(kind) or {}, str(place), is_per_pod)
    raise KeyError(f"volume {mount['name']!r}, which container {container['name']!r} mounts")


def _named(volume: _Volume) -> str:
    name = volume.source.get("claimName") or volume.source.get("path")
    return f"{volume.kind} {name}" if name else volume.kind


def _pods(name: str, workload: Mapping[str, Any], kind: str) -> list[str]:
    """Return names of the pods of a workload that may run at the same time and see the same volume."""
    spec = workload["spec"]
    if workload["kind"] == "DaemonSet" and kind == "hostPath":
        return [name]
    if workload["kind"] == "DaemonSet" or spec.get("replicas", 1) > 1 or spec.get("parallelism", 1) > 1:
        return [f"{name} (every replica)", "the next one"]
    if workload["kind"] == "Deployment":
        strategy = spec.get("strategy") or {}
        surge = (strategy.get("rollingUpdate") or {}).get("maxSurge", "25%")
        if strategy.get("type", "RollingUpdate") == "RollingUpdate" and surge not in (0, "0%"):
            return [f"{name} (before a rolling update)", "its successor (strategy Recreate prevents it)"]
    return [name]


def _quantity(text: object) -> int:
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise TypeError(f"{text!r} is not a quantity of bytes, such as 64Gi")
    return int(float(match[1]) * _UNITS[match[2]])
