"""Make asv's published pages viewable without a network: `python -m asv_benchmarks.site HTML [TARGET]`.

asv's page loads its scripts from content-delivery networks. They are npm packages, so this fetches the same releases
with npm, puts them beside the page, and rewrites the references.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Part of the address, npm package and release, file in it.
SCRIPTS = {
    "jquery-3.3.1.min.js": ("jquery@3.3.1", "dist/jquery.min.js"),
    "jquery.flot.min.js": ("flot@0.8.3", "jquery.flot.js"),
    "jquery.flot.time.min.js": ("flot@0.8.3", "jquery.flot.time.js"),
    "jquery.flot.selection.min.js": ("flot@0.8.3", "jquery.flot.selection.js"),
    "jquery.flot.categories.min.js": ("flot@0.8.3", "jquery.flot.categories.js"),
    "jquery.flot.orderBars.js": ("flot-orderbars@1.0.0", "js/jquery.flot.orderBars.js"),
    "stupidtable.min.js": ("stupid-table-plugin@1.1.3", "stupidtable.min.js"),
    "md5.min.js": ("blueimp-md5@2.19.0", "js/md5.min.js"),
    "bootstrap.min.js": ("bootstrap@3.1.1", "dist/js/bootstrap.min.js"),
    "bootstrap.min.css": ("bootstrap@3.1.1", "dist/css/bootstrap.min.css"),
}
_ADDRESS = re.compile(r'(src|href)="(https://[^"]+\.(?:js|css))"')


def fetch(package: str, file: str, target: Path) -> None:
    """Copy one file of an npm package to `target`."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, check=True
        )
        with tarfile.open(Path(folder, packed.stdout.split()[-1])) as archive:
            member = archive.extractfile(f"package/{file}")
            if member is None:
                raise ValueError(f"{package} has no file {file!r}")
            target.write_bytes(member.read())


def localise(html: Path) -> None:
    """Bring the scripts and styles that `index.html` loads from elsewhere beside it.

    Raises
    ------
    ValueError
        The page loads a script that is not in the table.
    """
    page = html / "index.html"
    vendor = html / "vendor"
    vendor.mkdir(exist_ok=True)

    def local(match: re.Match[str]) -> str:
        name = match[2].rsplit("/", 1)[-1]
        if name not in SCRIPTS:
            raise ValueError(f"{page} loads {match[2]!r}, which is in no npm package of the table")
        if not (vendor / name).exists():
            fetch(*SCRIPTS[name], vendor / name)
        return f'{match[1]}="vendor/{name}"'

    text = _ADDRESS.sub(local, page.read_text())
    # Checksums of the files that stood there before.
    text = re.sub(r'\s+integrity="[^"]*"|\s+crossorigin(="[^"]*")?', "", text)
    page.write_text(text)


def main() -> None:
    """Localise the page, and copy it to the target folder if one is given."""
    html = Path(sys.argv[1])
    localise(html)
    if len(sys.argv) > 2:
        shutil.copytree(html, sys.argv[2], dirs_exist_ok=True)


if __name__ == "__main__":
    main()
