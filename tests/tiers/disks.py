"""Disks that fail: system calls that are recorded and spoilt, and the directories that a crash may leave."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import struct
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from stores import payload, until

from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

SCALE = float(os.environ.get("KVCACHE_STRESS", "1"))
SECTOR_BYTES = 512


class Disk:
    """A disk tier over host blocks of its own."""

    def __init__(self, path, num_blocks, block_bytes, num_host, fingerprint=None, **options):
        self.host = np.frombuffer(mmap.mmap(-1, num_host * block_bytes), np.uint8).reshape(num_host, block_bytes)
        settings = DiskOptions(path=path, capacity=capacity_for(num_blocks, block_bytes), **options)
        self.tier = DiskTier(settings, self.host, fingerprint)
        self.job_id = 1

    def store(self, keys, seeds=None):
        """Store blocks with the bytes of their keys or seeds; return the result, or None if the tier refuses."""
        return self.move([(keys, seeds or keys)])[0]

    def load(self, keys):
        """Load blocks; return the result, and the loaded bytes by key."""
        self.host[:] = 0
        (result,) = self.move([(keys, None)])
        return result, {key: self.host[keys.index(key)].copy() for key in (result.done if result else ())}

    def move(self, jobs):
        """Run jobs of (keys, seeds, None for a load) beside each other; return a result, or None, of each."""
        first_row, results, under_way = 0, {}, set()
        for i, (keys, seeds) in enumerate(jobs):
            rows = list(range(first_row, first_row + len(keys)))
            first_row += len(keys)
            for row, seed in zip(rows, seeds or (), strict=False):
                self.host[row] = payload(seed, self.host.shape[1])
            submit = self.tier.submit_store if seeds else self.tier.submit_load
            if submit(self.job_id + i, keys, rows):
                under_way.add(self.job_id + i)

        def finish():
            results.update({result.job_id: result for result in self.tier.get_finished()})
            return under_way <= results.keys()

        until(finish)
        self.job_id += len(jobs)
        return [results.get(self.job_id - len(jobs) + i) for i in range(len(jobs))]

    def held(self, keys):
        return [key for key in keys if self.tier.lookup([key])]

    def wait_available(self):
        """Wait until the tier is open, and no reset is under way."""
        until(lambda: self.tier.get_finished() is not None and not self.reason.startswith(("opening", "reset")))

    @property
    def reason(self):
        return self.tier.stats().unavailable_reason


class Calls:
    """Replaces functions of `os`: it spoils calls, and records the changes of the directory `path` in `events`.

    `set` takes lines "operation share kind", such as "write/data 0.2 EIO": the share of calls on that file, or any,
    that are spoilt. A kind is the name of an errno, with "+" if the call is carried out before it fails, "short",
    "flip", or "hang", which lasts until `clear`. `full_from` is the first byte of `data` that finds no room.
    """

    def __init__(self, patch, draw, path=None):
        self.draw, self.path = draw, path
        self.faults, self.num_left, self.num_faults = [], math.inf, Counter()
        self.full_from = math.inf
        self.cleared = threading.Event()
        self.events, self.lock = [], threading.Lock()
        self.file_of, self.inode_of, self.folders = {}, {}, set()
        names = ("open", "close", "stat", "fsync", "fdatasync", "pread", "preadv", "pwrite", "pwritev")
        for name in (*names, "ftruncate", "unlink", "replace"):
            patch.setattr(os, name, partial(getattr(self, name), getattr(os, name)))

    def set(self, *lines, times=math.inf):
        self.cleared, self.num_left = threading.Event(), times
        for name, share, kind in map(str.split, lines):
            self.faults.append((*name.partition("/")[::2], float(share), kind))

    def clear(self):
        self.faults = []
        self.cleared.set()

    def fault(self, operation, fd=None):
        """Return the kind of fault of this call, or nothing; raise or hang if that is the fault."""
        for wanted, name, share, kind in self.faults:
            if wanted != operation or (name and name != self.file_of.get(fd)) or self.draw.random() >= share:
                continue
            if self.num_left <= 0:
                return ""
            self.num_left -= 1
            self.num_faults[operation] += 1
            if kind == "hang":
                self.cleared.wait(60)
                return ""
            if kind in ("short", "flip") or kind.endswith("+"):
                return kind
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
        return ""

    def spoilt(self, kind, body):
        """Return bytes of which the last ones are missing, or one bit differs."""
        if kind == "short" and len(body) > 1:
            return body[: self.draw.randrange(1, len(body))]
        if kind == "flip" and body:
            at = self.draw.randrange(len(body))
            return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        return body

    def add(self, *event):
        with self.lock:
            self.events.append(event)

    def adopt(self, files):
        """Record files as they are, durable."""
        self.events, self.inode_of = [], {name: number for number, name in enumerate(files)}
        for name, body in files.items():
            number = self.inode_of[name]
            self.events += [("create", name, number), ("write", number, 0, body)]
        self.events += [("sync", number, len(self.events)) for number in self.inode_of.values()]
        self.add("sync names", len(self.events))

    def open(self, real, path, flags, mode=0o777, *, dir_fd=None):
        self.fault("lookup")
        fd = real(path, flags, mode, dir_fd=dir_fd)
        with self.lock:
            self.file_of.pop(fd, None)
            if dir_fd is None and Path(path) == self.path:
                self.folders.add(fd)
            elif dir_fd in self.folders:
                name = self.file_of[fd] = os.fspath(path)
                if name not in self.inode_of:
                    self.inode_of[name] = len(self.events)
                    self.events.append(("create", name, self.inode_of[name]))
        return fd

    def close(self, real, fd):
        with self.lock:
            self.file_of.pop(fd, None)
            self.folders.discard(fd)
        real(fd)

    def stat(self, real, *arguments, **options):
        self.fault("lookup")
        return real(*arguments, **options)

    def pread(self, real, fd, size, offset):
        return self.spoilt(self.fault("read", fd), real(fd, size, offset))

    def preadv(self, real, fd, rows, offset, flags=0):
        if flags and ("read", "hang") in {(fault[0], fault[3]) for fault in self.faults}:
            # RWF_NOWAIT never waits for the disk.
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kind = self.fault("read", fd)
        num_bytes = real(fd, rows, offset, flags)
        if not kind:
            return num_bytes
        body = self.spoilt(kind, b"".join(rows)[:num_bytes])
        # Bytes after a short read are undefined.
        rest = body.ljust(sum(map(len, rows)), b"?")
        for row in rows:
            row[:], rest = rest[: len(row)], rest[len(row) :]
        return len(body)

    def pwrite(self, real, fd, body, offset):
        return self._write(real, fd, bytes(body), offset, offset)

    def pwritev(self, real, fd, rows, offset):
        length = sum(map(len, rows))
        if offset + length > self.full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Direct I/O takes aligned memory, and writes whole pages: the bytes after a short write become garbage.
        memory = mmap.mmap(-1, length)
        return self._write(lambda fd, body, offset: real(fd, [memory], offset), fd, b"".join(rows), offset, memory)

    def _write(self, real, fd, body, offset, memory):
        kind = self.fault("write", fd)
        written = self.spoilt(kind, body)
        if isinstance(memory, mmap.mmap):
            memory.write(written.ljust(len(body), b"?"))
        num_bytes = min(real(fd, written, offset), len(written))
        if fd in self.file_of:
            self.add("write", self.inode_of[self.file_of[fd]], offset, written[:num_bytes])
        if kind.endswith("+"):
            raise OSError(getattr(errno, kind[:-1]), "an error after the call")
        return num_bytes

    def fsync(self, real, fd):
        self._sync(real, fd)

    def fdatasync(self, real, fd):
        self._sync(real, fd)

    def _sync(self, real, fd):
        self.fault("sync", fd)
        before = len(self.events)
        if fd not in self.file_of and fd not in self.folders:
            real(fd)
        if fd in self.folders:
            self.add("sync names", before)
        elif fd in self.file_of:
            self.add("sync", self.inode_of[self.file_of[fd]], before)

    def ftruncate(self, real, fd, size):
        self.fault("change", fd)
        real(fd, size)
        if fd in self.file_of:
            self.add("truncate", self.inode_of[self.file_of[fd]], size)

    def unlink(self, real, name, *, dir_fd=None):
        real(name, dir_fd=dir_fd)
        if dir_fd in self.folders:
            del self.inode_of[name]
            self.add("unlink", name)

    def replace(self, real, old, new, *, src_dir_fd=None, dst_dir_fd=None):
        self.fault("change")
        real(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if src_dir_fd in self.folders:
            self.inode_of[new] = self.inode_of.pop(old)
            self.add("rename", old, new)


class File:
    """A file: its durable bytes, and its pending changes."""

    def __init__(self):
        self.body, self.pending = bytearray(), []

    def apply(self, event):
        if event[0] == "truncate":
            del self.body[event[2] :]
            self.body.extend(bytes(event[2] - len(self.body)))
        else:
            _, _, offset, piece = event
            self.body.extend(bytes(max(0, offset + len(piece) - len(self.body))))
            self.body[offset : offset + len(piece)] = piece

    def sync(self, before):
        for _, change in [change for change in self.pending if change[0] < before]:
            self.apply(change)
        self.pending = [change for change in self.pending if change[0] >= before]

    def crash(self, draw, share):
        """Apply a random share of the pending changes, sector by sector."""
        for _, (kind, inode, at, *piece) in self.pending:
            if kind == "truncate" and draw.random() < share:
                self.apply((kind, inode, at))
            if piece:
                cuts = range(at - at % SECTOR_BYTES, at + len(piece[0]), SECTOR_BYTES)
                for start, stop in ((max(cut, at) - at, cut + SECTOR_BYTES - at) for cut in cuts):
                    if draw.random() < share:
                        self.apply((kind, inode, at + start, piece[0][start:stop]))
        return bytes(self.body)


def crash_state(events, draw, is_kill):
    """Return the files that a crash after `events` may leave; a killed process loses no change."""
    files, names, pending_names = {}, {}, []

    def rename(kind, old, *new):
        if kind == "create":
            names[old] = new[0]
        elif kind == "unlink":
            names.pop(old, None)
        else:
            names[new[0]] = names.pop(old)

    for i, event in enumerate(events):
        if event[0] in ("create", "unlink", "rename"):
            pending_names.append((i, event))
            if event[0] == "create":
                files[event[2]] = File()
        elif event[0] in ("write", "truncate"):
            files[event[1]].pending.append((i, event))
        elif event[0] == "sync":
            files[event[1]].sync(event[2])
        else:
            for _, change in [change for change in pending_names if change[0] < event[1]]:
                rename(*change)
            pending_names = [change for change in pending_names if change[0] >= event[1]]
    share = 1.0 if is_kill else draw.choice([0.0, 0.5, 0.9, 1.0, 1.0])
    kept = len(pending_names) if is_kill else draw.randint(0, len(pending_names))
    for _, event in pending_names[:kept]:
        rename(*event)
    return {name: files[inode].crash(draw, share) for name, inode in names.items()}


def keys_on_disk(files, num_slots):
    """Return the keys of the whole blocks in a directory's files, read by their format without kvcache.

    None if another number of slots will resize the directory.
    """
    header = json.loads(files.get("kvcache.json", '{"resizing": true}'))
    if header["resizing"] or header["num_slots"] != num_slots:
        return None
    names = ("format", "version", "block_bytes", "fingerprint", "salt")
    text, block_bytes = json.dumps([header[name] for name in names], sort_keys=True), header["block_bytes"]
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    if files["lock"][256:264] == header["salt"].to_bytes(8, "little"):
        return set()
    factors = [factor | 1 for factor in struct.unpack("<15Q", hashlib.shake_128(b"kvcache").digest(120))]
    latest = {}
    for slot in range(num_slots):
        record = files["records"][slot * 128 : (slot + 1) * 128].ljust(128, b"\0")
        words = struct.unpack("<16Q", record)
        mixed = [(word ^ (word >> 32)) * 0xBF58476D1CE4E5B9 % (1 << 64) for word in words[:15]]
        seal = sum((word ^ (word >> 29)) * factor for word, factor in zip(mixed, factors, strict=True)) + seed
        seq, check, length, epoch, key_bytes = struct.unpack_from("<QQIIH", record)
        if seal % (1 << 64) == words[15] and (epoch, length) == (header["epoch"], block_bytes) and key_bytes:
            key = record[32 : 32 + key_bytes]
            latest[key] = max(latest.get(key, ()), (seq, slot, check))
    slot_bytes = -(-block_bytes // 4096) * 4096
    return {
        key
        for key, (_, slot, check) in latest.items()
        for block in [files["data"][slot * slot_bytes :][:block_bytes]]
        if xxhash.xxh3_64_intdigest(struct.pack("<IQ", len(key), block_bytes) + key + block, seed) == check
    }
