"""`kvcache tier`: inspect, verify, compact or clear the folder of a disk tier; clear a shared store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from kvcache.cli import common
from kvcache.options import format_size, parse_size, without_secrets

if TYPE_CHECKING:
    from kvcache.tiers.disk.maintenance import Progress, TierFacts


def _check_folder(path: Path) -> Path:
    if ":/" in str(path) and not path.exists():
        raise ValueError(
            "path must be the folder of a disk tier, not a URL: `kvcache check` connects to a server, "
            "`kvcache tier clear` empties it"
        )
    return path


PathArgument = Annotated[Path, typer.Argument(help="Folder of the tier.", show_default=False, callback=_check_folder)]


def inspect(path: PathArgument, json: common.JsonOption = None) -> None:
    """Show the size of a disk tier, its blocks, their uses, and their model."""
    from kvcache.tiers.disk.maintenance import inspect_tier

    common.check_writable("--json", json)
    _report(inspect_tier(path), json)


def verify(
    path: PathArgument,
    wipe: Annotated[bool, typer.Option("--wipe", help="Drop the blocks that are bad.")] = False,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Read every block and compare its checksum."""
    from kvcache.tiers.disk.maintenance import verify_tier

    common.check_writable("--json", json)
    num_good, num_bad = _with_progress("verify", quiet, lambda progress: verify_tier(path, wipe, progress))
    text = f"{num_good:,} blocks are right, {num_bad:,} are not{' and were dropped' if wipe else ''}"
    common.report(json, {"path": str(path), "good_blocks": num_good, "bad_blocks": num_bad, "wiped": wipe}, text)
    if num_bad and not wipe:
        raise common.CommandError(f"{num_bad} blocks of {path} do not verify")


def compact(
    path: PathArgument,
    capacity: Annotated[
        str | None, typer.Option(help="New capacity, as in 100GiB.", metavar="SIZE", show_default=False)
    ] = None,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Pack the most recent blocks together and give the rest of the disk space back."""
    from kvcache.tiers.disk.maintenance import compact_tier

    common.check_writable("--json", json)
    capacity_bytes = None if capacity is None else parse_size("--capacity", capacity)
    facts = _with_progress("compact", quiet, lambda progress: compact_tier(path, capacity_bytes, progress))
    _report(facts, json)


def clear(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a disk tier; server (valkey://HOST:PORT); or the bucket and prefix of a tier (s3://BUCKET/PREFIX).",
            show_default=False,
        ),
    ],
    prefix: Annotated[
        str, typer.Option(help="In a store: delete only names that begin with this.", metavar="PREFIX")
    ] = "kvcache:",
    endpoint: Annotated[
        str | None, typer.Option(help="Endpoint of a bucket that is not on AWS.", metavar="URL", show_default=False)
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="The server is a cluster.")] = False,
    connected: Annotated[
        bool, typer.Option("--connected", help="Delete although other clients are connected to the server.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Delete all blocks of a disk tier, of any format, of a Valkey or Redis server, or of a bucket.

    A folder that an engine uses is refused, and so is a server with other clients. A password of the server is taken
    from KVCACHE_VALKEY_PASSWORD, credentials of a bucket from the environment. A Mooncake Store is cleared by
    restarting its master.
    """
    common.check_writable("--json", json)
    console = common.console(json)

    def confirm(text: str) -> None:
        if not yes:
            typer.confirm(f"{text}. Delete?", abort=True, err=True)
        elif json != "-":
            console.print(text, soft_wrap=True, markup=False, emoji=False)

    # Options of a server would silently do nothing for a folder.
    if "://" in target and (not prefix.startswith("kvcache:") or set(prefix) & set("*?[\\/")):
        raise ValueError(f"--prefix must begin with 'kvcache:' and hold no pattern or slash, got {prefix!r}")
    if target.startswith("s3://"):
        if cluster or connected:
            raise ValueError("--cluster and --connected need the URL of a Valkey server")
        done = _clear_bucket(target, endpoint, prefix, confirm)
    elif endpoint is not None:
        raise ValueError("--endpoint needs a bucket, s3://BUCKET/PREFIX")
    elif "://" in target:
        done = _clear_server(target, prefix, cluster, connected, confirm)
    elif prefix != "kvcache:" or cluster or connected:
        raise ValueError(f"--prefix, --cluster and --connected need the URL of a server, got {target!r}")
    else:
        done = _clear_folder(Path(target), confirm)
    shown = without_secrets(target) if "://" in target else target
    common.report(json, {"target": shown, **done}, f"deleted {done['deleted']}")


def _clear_folder(path: Path, confirm: Callable[[str], None]) -> dict[str, Any]:
    from kvcache.tiers.disk.directory import clear_directory, directory_bytes, writer_of
    from kvcache.tiers.disk.header import TierDirectoryError
    from kvcache.tiers.disk.maintenance import inspect_tier

    if not path.is_dir():
        raise ValueError(f"{path} must be the folder of a disk tier")
    if in_use := writer_of(path):
        raise TierDirectoryError(in_use)
    try:
        facts = inspect_tier(path)
        held = f"{facts.num_held:,} blocks"
    except TierDirectoryError as error:
        held = f"blocks that this kvcache cannot read ({error})"
    confirm(f"{path} holds {held}, {format_size(directory_bytes(path))} on disk")
    num_bytes = clear_directory(path)
    return {"deleted": format_size(num_bytes), "bytes": num_bytes}


def _clear_server(
    url: str, prefix: str, cluster: bool, connected: bool, confirm: Callable[[str], None]
) -> dict[str, Any]:
    from kvcache.tiers.valkey import ValkeyOptions, clear_server

    values = ValkeyOptions(url=url, cluster=cluster)

    def ask(counts: dict[str, int], clients: list[str] | None) -> None:
        if clients and not connected:
            raise ValueError(
                f"{len(clients)} other clients are connected ({', '.join(clients[:5])}): "
                "stop the engines, or add --connected"
            )
        unknown = "" if clients is not None else "; this user may not list the clients, so engines may be connected"
        confirm(f"{without_secrets(url)} holds {_described(counts)}{unknown}")

    num_names = clear_server(values, prefix, ask)
    return {"deleted": f"{num_names:,} names", "names": num_names}


def _clear_bucket(url: str, endpoint: str | None, prefix: str, confirm: Callable[[str], None]) -> dict[str, Any]:
    from kvcache.tiers.s3 import S3Options, clear_bucket

    parts = urlsplit(url)
    values = S3Options(bucket=parts.netloc, prefix=parts.path.strip("/"), endpoint=endpoint)

    def ask(counts: dict[str, int]) -> None:
        confirm(f"{url} holds {_described(counts)}; engines that use them cannot be listed")

    num_names = clear_bucket(values, prefix, ask)
    return {"deleted": f"{num_names:,} names", "names": num_names}


def _described(counts: dict[str, int]) -> str:
    listed = ", ".join(f"{model}: {count:,}" for model, count in counts.items())
    return f"{sum(counts.values()):,} names ({listed or 'none'})"


def _with_progress(name: str, is_quiet: bool, work: Callable[[Progress], Any]) -> Any:
    with common.Bar(name, "blocks", is_quiet, total=None) as bar:

        def progressed(num_done: int, num_blocks: int) -> None:
            if bar.is_due() or num_done == num_blocks:
                bar.show(num_done, num_done, total=num_blocks)

        return work(progressed)


def _report(facts: TierFacts, json: str | None) -> None:
    rows = (
        ("blocks held", f"{facts.num_held:,} of {facts.num_slots:,}"),
        ("block", format_size(facts.block_bytes)),
        ("capacity", format_size(facts.capacity_bytes)),
        ("on disk", format_size(facts.bytes_on_disk)),
        ("loads of held blocks", f"{facts.uses:,}, at most {facts.most_uses:,} of one"),
        ("never loaded", f"{facts.never_used_blocks:,}"),
        ("open to other users", ", ".join(facts.shared_names) or "nothing"),
        *((f"fingerprint: {key}", str(value)) for key, value in facts.fingerprint.items()),
    )
    common.report(json, asdict(facts), facts.path, common.facts_table(rows))
