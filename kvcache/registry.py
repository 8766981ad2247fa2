"""Registries of classes that users choose by a name, by the class itself, or by its path.

One mechanism serves policies, tiers and specs, so that adding one is a file and a line.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


def _entry_points(group: str) -> EntryPoints:
    # Most of what `import kvcache` would cost, and most never ask.
    from importlib.metadata import entry_points

    return entry_points(group=group)


class Registry:
    """A mapping from names to classes that are imported when they are first asked for.

    Parameters
    ----------
    kind : str
        What the classes are, for error messages: ``"policy"``.
    group : str
        Entry-point group that third parties register theirs in: ``"kvcache.policies"``.
    builtin : dict of str to str
        Name to ``"package.module:Class"``.
    base : str
        The path of a class that every choice must be a subclass of.
    """

    def __init__(self, kind: str, group: str, builtin: dict[str, str], base: str = "builtins:object") -> None:
        self.kind = kind
        self.group = group
        self._base = base
        self._paths = dict(builtin)

    def names(self) -> list[str]:
        """Return every known name: built-in ones in their order, then third parties' sorted."""
        extra = {point.name for point in _entry_points(self.group)} - self._paths.keys()
        return [*self._paths, *sorted(extra)]

    def register(self, name: str, path: str) -> None:
        """Make `path` (``"package.module:Class"``) known as `name`.

        Raises
        ------
        ValueError
            The name is taken by another path, or the path has no colon.
        """
        if ":" not in path:
            raise ValueError(f"{self.kind} path must be 'package.module:Class', got {path!r}")
        if self._paths.get(name, path) != path:
            raise ValueError(f"{self.kind} {name!r} is already {self._paths[name]!r}")
        self._paths[name] = path

    def name_of(self, found: type) -> str | None:
        """Return the name that a class, or its `group_policy`, is registered under; None where it is not."""
        path = f"{found.__module__}:{found.__qualname__}"
        for name in self.names():
            try:
                if (kind := self.resolve(name)) is found or getattr(kind, "group_policy", None) == path:
                    return name
            except ValueError:
                continue
        return None

    def path_of(self, choice: Any) -> str:
        """Return what `resolve` finds a choice by in another process: a known name, or ``"package.module:Class"``."""
        if isinstance(choice, str):
            return choice
        return self.name_of(choice) or f"{choice.__module__}:{choice.__qualname__}"

    def resolve(self, choice: Any) -> type[Any]:
        """Return the class that `choice` names.

        Parameters
        ----------
        choice : str or type
            A known name, ``"package.module:Class"``, or the class itself.

        Raises
        ------
        ValueError
            The name is unknown (the message lists the known ones), the path does not lead to a class, or the class is
            of another kind.
        """
        resolved = choice if isinstance(choice, type) else self._find(choice)
        module_name, _, name = self._base.partition(":")
        if not issubclass(resolved, getattr(importlib.import_module(module_name), name)):
            raise ValueError(f"{self.kind} {choice!r} must be a subclass of {name}, got {resolved!r}")
        return resolved

    def _find(self, choice: Any) -> type[Any]:
        if not isinstance(choice, str):
            raise ValueError(f"{self.kind} must be a name, a class or 'package.module:Class', got {choice!r}")
        path = self._paths.get(choice)
        if path is None:
            for point in _entry_points(self.group):
                if point.name == choice:
                    path = point.value
                    break
            else:
                path = choice
        if ":" not in path:
            known = self.names()
            hint = did_you_mean(choice, known)
            raise ValueError(f"unknown {self.kind} {choice!r}, known ones: {', '.join(known)}{hint}")
        module_name, _, attribute = path.partition(":")
        # An empty or relative name would raise other errors than ImportError.
        if not all(part.isidentifier() for name in (module_name, attribute) for part in name.split(".")):
            raise ValueError(f"{self.kind} {choice!r} must be 'package.module:Class'")
        try:
            resolved: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                resolved = getattr(resolved, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.kind} {choice!r} cannot be imported: {error}{how_to_install(error)}") from error
        if not isinstance(resolved, type):
            raise ValueError(f"{self.kind} {choice!r} must name a class, got {resolved!r}")
        return resolved


_EXTRAS = {
    "cryptography": "cryptography",
    "dask": "dask",
    "distributed": "dask",
    "matplotlib": "plot",
    "mooncake": "mooncake",
    "msgspec": "record",
    "obstore": "s3",
    "prometheus_client": "prometheus",
    "rich": "cli",
    "transformers": "transformers",
    "typer": "cli",
    "valkey": "valkey",
    "xxhash": "disk",
    "zstandard": "zstd",
}
"""Top-level module of each optional package, and the extra of kvcache that installs it."""


def how_to_install(error: BaseException | None) -> str:
    """Return the pip command for the optional package whose import raised `error`, to end a message with; or ""."""
    while error is not None:
        extra = _EXTRAS.get((getattr(error, "name", None) or "").partition(".")[0])
        if extra is not None:
            return f"; pip install 'kvcache[{extra}]', or in a checkout: pip install '.[{extra}]'"
        error = error.__cause__
    return ""


_RECORD_AND_PLAN = "use 'record', and `kvcache plan` on the recording"
REMOVED = {
    "kv_events": "vLLM publishes events with --kv-events-config; for your own engine copy docs/howto/routers.md",
    "retention_share": "leave it out: hints of 'next_use' need no share",
    "what_if": _RECORD_AND_PLAN,
    "--what-if": _RECORD_AND_PLAN,
}
"""Names of options and classes that an older configuration may hold, and what to use instead, for errors."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return a hint for an error about an unknown word: its replacement, or a similar known word, or ""."""
    if word in REMOVED:
        return f"; it was removed: {REMOVED[word]}"
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


POLICIES = Registry(
    "policy",
    "kvcache.policies",
    {
        "lru": "kvcache.policies.lru:LRUCachePolicy",
        "arc": "kvcache.policies.arc:ARCCachePolicy",
        "gittins": "kvcache.policies.gittins:GittinsCachePolicy",
    },
    "kvcache.policies.base:CachePolicy",
)

TIERS = Registry(
    "tier",
    "kvcache.tiers",
    {
        "disk": "kvcache.tiers.disk.tier:DiskTier",
        "memory": "kvcache.tiers.memory:MemoryTier",
        "mooncake": "kvcache.tiers.mooncake:MooncakeTier",
        "s3": "kvcache.tiers.s3:S3Tier",
        "valkey": "kvcache.tiers.valkey:ValkeyTier",
    },
    "kvcache.tiers.base.tier:Tier",
)

CODECS = Registry(
    "codec",
    "kvcache.codecs",
    {
        "fp8": "kvcache.tiers.codecs.fp8:Fp8Codec",
        "zstd": "kvcache.tiers.codecs.zstd:ZstdCodec",
        "aes_gcm": "kvcache.tiers.codecs.aes_gcm:AesGcmCodec",
    },
    "kvcache.tiers.base.codec:Codec",
)

SPECS = Registry(
    "spec",
    "kvcache.specs",
    {"cpu": "kvcache.assembly.spec:CPUOffloadingSpec", "tiering": "kvcache.assembly.spec:TieringOffloadingSpec"},
    "kvcache.assembly.spec:OffloadingSpec",
)

EXPORTERS = Registry(
    "exporter",
    "kvcache.exporters",
    {
        "status": "kvcache.exporters.status:StatusServer",
        "prometheus": "kvcache.exporters.prometheus:PrometheusExporter",
    },
    "kvcache.control.telemetry:Exporter",
)

COMMANDS = Registry(
    "command",
    "kvcache.commands",
    {
        "status": "kvcache.exporters.commands:StatusCommand",
        "samples": "kvcache.exporters.commands:SamplesCommand",
        "next_version": "kvcache.exporters.commands:NextVersionCommand",
        "hints": "kvcache.exporters.commands:HintsCommand",
        "record": "kvcache.recorder.command:RecordCommand",
    },
    "kvcache.control.telemetry:Command",
)
"""What a running engine answers on its status socket."""
