"""Write an sdist again with the commit's time, no owner and sorted names, so that two builds are equal."""

import gzip
import os
import sys
import tarfile
from io import BytesIO
from pathlib import Path


def repack(path: Path, seconds: int) -> None:
    """Replace the archive at `path`; every time in it becomes `seconds` since the epoch."""
    packed = BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=seconds))


for name in sys.argv[1:]:
    repack(Path(name), int(os.environ["SOURCE_DATE_EPOCH"]))
