"""Print the lines of each feature of docs/features.md, the largest first: ``python docs/features.py``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def entries() -> dict[str, str]:
    """Return the feature of each file or folder that the ledger names; ValueError if one is named twice."""
    found: dict[str, str] = {}
    for row in re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "features.md").read_text(), re.MULTILINE):
        feature, _, _, files, _ = row.split(" | ")
        for entry in re.findall(r"`([^`]+)`", files):
            if entry in found:
                raise ValueError(f"{entry} stands in two rows: {found[entry]} and {feature}")
            found[entry] = feature
    return found


def files_of() -> dict[str, list[Path]]:
    """Return the files of each entry: those to which no longer entry leads. "" has those of no row."""
    named = entries()
    files: dict[str, list[Path]] = {entry: [] for entry in ["", *named]}
    for path in sorted((ROOT / "kvcache").rglob("*.*")):
        name = str(path.relative_to(ROOT / "kvcache"))
        if path.is_file() and "__pycache__" not in name and path.suffix not in (".so", ".c"):
            leading = [entry for entry in named if name == entry or (entry[-1] == "/" and name.startswith(entry))]
            files[max(leading, key=len, default="")].append(path)
    return files


def main() -> None:
    """Print a line per feature."""
    lines: Counter[str] = Counter()
    named = entries() | {"": "in no row"}
    for entry, paths in files_of().items():
        lines[named[entry]] += sum(path.read_bytes().count(b"\n") for path in paths)
    for feature, num_lines in lines.most_common():
        print(f"{num_lines:7,} {feature}")


if __name__ == "__main__":
    main()
