"""After a power cut, a disk tier serves no wrong byte, keeps durable blocks, and has no blocks from before a reset.

The test records each change that the tier makes to its directory, and replays them to states that a crash may leave:
any sectors that were not synced, and any first part of the renames, may be written.
"""

import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from disks import SCALE, Disk
from stores import payload

from kvcache.epoch import Epoch

NUM_RECORDINGS = max(1, round(4 * SCALE))
NUM_STATES = 60
BLOCK_BYTES = 4096
NUM_BLOCKS = 12
SECTOR_BYTES = 512


def key_of(number):
    return b"block-%06d" % number


def open_disk(path, num_blocks=NUM_BLOCKS):
    # A later start finds the blocks of a reset by their version only.
    options = {"fingerprint": Epoch.of_version("v1").of_fingerprint({}), "preallocate": False}
    return Disk(path, num_blocks, BLOCK_BYTES, NUM_BLOCKS, num_threads=2, flush_interval_s=1000, **options)


class Recorder:
    """Record every change to the files of one directory in order, and which changes a sync covers."""

    def __init__(self, path, monkeypatch):
        self.path = path
        self.events = []
        self.lock = threading.Lock()
        self.inode_of = {}
        self.name_to_inode = {}
        self.directories = set()
        self.num_inodes = 0
        self.real = {name: getattr(os, name) for name in ("open", "close", "pwrite", "pwritev", "ftruncate")}
        self.real |= {name: getattr(os, name) for name in ("fsync", "fdatasync", "unlink", "replace")}
        for name in self.real:
            monkeypatch.setattr(os, name, getattr(self, name))

    def add(self, *event):
        with self.lock:
            self.events.append(event)

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        fd = self.real["open"](path, flags, mode, dir_fd=dir_fd)
        with self.lock:
            if dir_fd is None and Path(path) == self.path:
                self.directories.add(fd)
            elif dir_fd in self.directories:
                name = os.fspath(path)
                if name not in self.name_to_inode:
                    self.num_inodes += 1
                    self.name_to_inode[name] = self.num_inodes
                    self.events.append(("create", name, self.num_inodes))
                self.inode_of[fd] = self.name_to_inode[name]
        return fd

    def close(self, fd):
        with self.lock:
            self.inode_of.pop(fd, None)
            self.directories.discard(fd)
        self.real["close"](fd)

    def pwrite(self, fd, body, offset):
        written = self.real["pwrite"](fd, body, offset)
        if fd in self.inode_of:
            self.add("write", self.inode_of[fd], offset, bytes(body)[:written])
        return written

    def pwritev(self, fd, rows, offset):
        written = self.real["pwritev"](fd, rows, offset)
        if fd in self.inode_of:
            self.add("write", self.inode_of[fd], offset, b"".join(map(bytes, rows))[:written])
        return written

    def ftruncate(self, fd, size):
        self.real["ftruncate"](fd, size)
        if fd in self.inode_of:
            self.add("truncate", self.inode_of[fd], size)

    def fsync(self, fd):
        self._sync("fsync", fd)

    def fdatasync(self, fd):
        self._sync("fdatasync", fd)

    def _sync(self, call, fd):
        before = len(self.events)
        self.real[call](fd)
        if fd in self.directories:
            self.add("sync names", before)
        elif fd in self.inode_of:
            self.add("sync", self.inode_of[fd], before)

    def unlink(self, name, *, dir_fd=None):
        self.real["unlink"](name, dir_fd=dir_fd)
        if dir_fd in self.directories:
            del self.name_to_inode[name]
            self.add("unlink", name)

    def replace(self, old, new, *, src_dir_fd=None, dst_dir_fd=None):
        self.real["replace"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if src_dir_fd in self.directories:
            self.name_to_inode[new] = self.name_to_inode.pop(old)
            self.add("rename", old, new)


class File:
    """A file: its durable bytes, and its pending changes."""

    def __init__(self):
        self.body = bytearray()
        self.pending = []

    def apply(self, event):
        if event[0] == "truncate":
            del self.body[event[2] :]
            self.body.extend(bytes(event[2] - len(self.body)))
        else:
            _, _, offset, piece = event
            self.body.extend(bytes(max(0, offset + len(piece) - len(self.body))))
            self.body[offset : offset + len(piece)] = piece

    def crash(self, draw, share):
        """Apply a random share of the pending changes, sector by sector."""
        for _, event in self.pending:
            if event[0] == "truncate":
                if draw.random() < share:
                    self.apply(event)
                continue
            _, inode, offset, piece = event
            start = 0
            while start < len(piece):
                stop = min(len(piece), start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES)
                if draw.random() < share:
                    self.apply(("write", inode, offset + start, piece[start:stop]))
                start = stop
        return bytes(self.body)


def crash_state(events, draw, is_kill):
    """Return the files that a crash after `events` may leave; a killed process loses no change."""
    files, names, pending_names = {}, {}, []

    def rename(event):
        if event[0] == "create":
            names[event[1]] = event[2]
        elif event[0] == "unlink":
            names.pop(event[1], None)
        else:
            names[event[2]] = names.pop(event[1])

    for i, event in enumerate(events):
        if event[0] in ("create", "unlink", "rename"):
            pending_names.append((i, event))
            if event[0] == "create":
                files[event[2]] = File()
        elif event[0] in ("write", "truncate"):
            files[event[1]].pending.append((i, event))
        elif event[0] == "sync":
            file = files[event[1]]
            for before, change in file.pending:
                if before < event[2]:
                    file.apply(change)
            file.pending = [change for change in file.pending if change[0] >= event[2]]
        elif event[0] == "sync names":
            for before, change in pending_names:
                if before < event[1]:
                    rename(change)
            pending_names = [change for change in pending_names if change[0] >= event[1]]
    share = 1.0 if is_kill else draw.choice([0.0, 0.5, 0.9, 1.0, 1.0])
    kept = len(pending_names) if is_kill else draw.randint(0, len(pending_names))
    for _, event in pending_names[:kept]:
        rename(event)
    return {name: files[inode].crash(draw, share) for name, inode in names.items()}


class Workload:
    """Store, load, flush, reset and reopen at random; after each step, record which blocks must survive a crash."""

    def __init__(self, path, seed, promise):
        self.path = path
        self.draw = random.Random(seed)
        self.promise = promise
        self.generation = 0
        self.num_blocks = NUM_BLOCKS
        self.stored = {}  # number -> generation, reported as stored
        self.durable = {}
        self.disk = open_disk(path)
        self.say()

    def say(self):
        self.promise(dict(self.stored), dict(self.durable), self.generation)

    def step(self):
        kind = self.draw.choices(["store", "flush", "reset", "reopen"], [8, 3, 1, 0.5])[0]
        getattr(self, kind)()
        self.say()

    def store(self):
        numbers = self.draw.sample(range(40), self.draw.randint(1, 4))
        result = self.disk.store([key_of(n) for n in numbers], [[n, self.generation] for n in numbers])
        for key in result.removed:
            number = int(key[6:])
            self.stored.pop(number, None)
            self.durable.pop(number, None)
        for key in result.done:
            self.stored[int(key[6:])] = self.generation

    def flush(self):
        self.disk.tier.flush()
        self.durable = dict(self.stored)

    def reset(self):
        self.stored, self.durable = {}, {}
        self.say()
        self.disk.tier.reset("v1")
        # From here on, a killed process leaves no blocks. A power cut may leave some until the tier reports the reset.
        self.promise({}, {}, self.generation, is_reset=True)
        self.disk.wait_available()
        self.generation += 1

    def reopen(self):
        self.disk.tier.shutdown()
        self.durable = dict(self.stored)
        self.say()
        num_blocks = self.draw.choice([NUM_BLOCKS - 4, NUM_BLOCKS])
        if num_blocks < self.num_blocks:
            # This test does not check which blocks a smaller tier drops.
            self.stored, self.durable = {}, {}
            self.say()
        self.num_blocks = num_blocks
        self.disk = open_disk(self.path, num_blocks)


def held_blocks(path):
    """Open the directory after a crash.

    Return each block that it serves (number -> generation, -1 if wrong), and the number of corrupt blocks.
    """
    disk = open_disk(path)
    try:
        held = disk.held(map(key_of, range(40)))
        _, loaded = disk.load(held) if held else (None, {})
        num_corrupt = disk.tier.stats().corrupt_blocks
    finally:
        disk.tier.shutdown()
    found = {}
    for key, block in loaded.items():
        number = int(key[6:])
        matches = (g for g in range(60) if np.array_equal(block, payload([number, g], BLOCK_BYTES)))
        found[number] = next(matches, -1)
    return found, num_corrupt


def faults_of(found, must, generations):
    """Return descriptions of wrong and missing blocks after a crash."""
    wrong = {number: generation for number, generation in found.items() if generation not in generations}
    missing = {number for number, generation in must.items() if found.get(number) != generation}
    return [
        *(f"serves {n} of generation {g}, not {generations}" for n, g in wrong.items()),
        *(f"lost {n}" for n in missing),
    ]


@pytest.mark.parametrize("seed", range(NUM_RECORDINGS))
def test_every_crash_state_is_sound(tmp_path, monkeypatch, seed):
    path = tmp_path / "tier"
    recorder = Recorder(path, monkeypatch)
    promises = []
    workload = Workload(
        path, seed, lambda *promise, is_reset=False: promises.append((len(recorder.events), *promise, is_reset))
    )
    for _ in range(40):
        workload.step()
    workload.disk.tier.shutdown()
    monkeypatch.undo()
    draw = random.Random(seed)
    counts = Counter()
    for number in range(NUM_STATES):
        at = draw.randint(promises[0][0], len(recorder.events))
        is_kill = draw.random() < 0.25
        files = crash_state(recorder.events[:at], draw, is_kill)
        left = tmp_path / f"left-{number}"
        left.mkdir(mode=0o700)
        for name, body in files.items():
            (left / name).write_bytes(body)
        before = [promise for promise in promises if promise[0] <= at][-1]
        after = next((promise for promise in promises if promise[0] > at), before)
        held = 1 if is_kill else 2
        must = {n: g for n, g in before[held].items() if after[held].get(n) == g}
        generations = {before[3], after[3]}
        if is_kill and before[4]:
            generations = set()
        found, num_corrupt = held_blocks(left)
        faults = faults_of(found, must, generations)
        if is_kill and num_corrupt:
            # A killed process loses no change, so only a bad medium makes a block corrupt.
            faults.append(f"counts {num_corrupt} blocks as corrupt")
        assert not faults, (seed, number, at, is_kill, faults)
        counts.update(states=1, kills=is_kill, blocks=len(found), promised=len(must))
        shutil.rmtree(left)
    print(dict(counts))
    assert counts["promised"] > NUM_STATES // 4
