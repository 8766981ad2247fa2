"""Kill a writer of a disk tier at random moments, repeatedly, and check the files that it leaves.

Run as ``python tests/isolated/disk_kills.py FOLDER NUM_KILLS SEED``; prints one line of JSON.
"""

import hashlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

from kvcache.epoch import Epoch
from kvcache.tiers.disk.directory import directory_bytes
from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

BLOCK_BYTES = 16384
NUM_BLOCKS = 200
JOB_BLOCKS = 8
LOAD_BLOCKS = 4
NUM_JOBS = 4


def open_tier(folder):
    flat = np.frombuffer(mmap.mmap(-1, NUM_JOBS * 2 * JOB_BLOCKS * BLOCK_BYTES), np.uint8)
    host_blocks = flat.reshape(-1, BLOCK_BYTES)
    # A later start finds the blocks of a reset by their version only.
    named = Epoch.of_version("v1").of_fingerprint({})
    return host_blocks, DiskTier(
        DiskOptions(path=folder, capacity=CAPACITY_BYTES, flush_interval_s=0.02), host_blocks, named
    )


CAPACITY_BYTES = capacity_for(NUM_BLOCKS, BLOCK_BYTES)


def key_of(number):
    return b"block-%012d" % number


def payload(number):
    words = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)
    return ((words + np.uint64(1)) * np.uint64(number * 2654435761 + 1)).view(np.uint8)


def write_until_killed(folder, first, pipe, draw):
    """Store blocks, load older ones, and reset sometimes; print which blocks are begun, stored and reset."""
    host_blocks, tier = open_tier(folder)
    free = list(range(NUM_JOBS))
    jobs, loading = {}, set()
    number = first
    os.write(pipe, b"R 0 0\n")
    while True:
        if draw.random() < 0.02:
            os.write(pipe, b"Y 0 %d\n" % (number - 1))
            tier.reset("v1")
            # `reset` has returned: from here on, a kill must not bring blocks back.
            os.write(pipe, b"X 0 %d\n" % (number - 1))
            while jobs or loading or tier.stats().unavailable_reason:
                for result in tier.get_finished():
                    if result.job_id is None:
                        continue
                    if result.job_id < 0:
                        loading.discard(-result.job_id - 1)
                    elif result.job_id in jobs:
                        free.append(jobs.pop(result.job_id)[0])
                time.sleep(0)
        while free:
            slot = free.pop()
            job_id = number + 1
            numbers = list(range(number, number + draw.randint(1, JOB_BLOCKS)))
            number = numbers[-1] + 1
            ids = [slot * 2 * JOB_BLOCKS + i for i in range(len(numbers))]
            for block_id, n in zip(ids, numbers, strict=True):
                host_blocks[block_id] = payload(n)
            os.write(pipe, b"B %d %d\n" % (numbers[0], numbers[-1]))
            assert tier.submit_store(job_id, [key_of(n) for n in numbers], ids)
            jobs[job_id] = (slot, numbers)
            recent = [n for n in range(max(0, number - 50), numbers[0] - 40) if tier.lookup([key_of(n)])][:LOAD_BLOCKS]
            if recent and slot not in loading:
                loading.add(slot)
                targets = [ids[0] + JOB_BLOCKS + i for i in range(len(recent))]
                tier.submit_load(-slot - 1, [key_of(n) for n in recent], targets)
        for result in tier.get_finished():
            if result.job_id is None:
                continue
            if result.job_id < 0:
                loading.remove(-result.job_id - 1)
                assert not result.failed, result
                continue
            slot, numbers = jobs.pop(result.job_id)
            assert len(result.done) == len(numbers), result
            os.write(pipe, b"D %d %d\n" % (numbers[0], numbers[-1]))
            free.append(slot)
        time.sleep(0)


def mixed(word):
    word = (word ^ (word >> 32)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return word ^ (word >> 29)


def blocks_on_disk(folder):
    """Read the files by their format, without kvcache; return the blocks that they hold, and the wrong ones."""
    header = json.loads((folder / "kvcache.json").read_text())
    text = json.dumps(
        [header["format"], header["version"], header["block_bytes"], header["fingerprint"], header["salt"]],
        sort_keys=True,
    )
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    if (folder / "lock").read_bytes()[256:264] == header["salt"].to_bytes(8, "little"):
        return set(), set()
    records, data = (folder / "records").read_bytes(), (folder / "data").read_bytes()
    latest = {}
    factors = [factor | 1 for factor in struct.unpack("<15Q", hashlib.shake_128(b"kvcache").digest(120))]
    for slot in range(header["num_slots"]):
        record = records[slot * 128 : (slot + 1) * 128]
        words = struct.unpack("<16Q", record)
        seal = sum(mixed(word) * factor for word, factor in zip(words[:15], factors, strict=True)) + seed
        seq, check, length, epoch, key_bytes = struct.unpack_from("<QQIIH", record)
        if seal % (1 << 64) != words[15] or epoch != header["epoch"] or length != BLOCK_BYTES or not key_bytes:
            continue
        key = record[32 : 32 + key_bytes]
        if seq >= latest.get(key, (0,))[0]:
            latest[key] = seq, slot, check
    whole, wrong = set(), set()
    for key, (_, slot, check) in latest.items():
        block = data[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]
        number = int(key[6:])
        if xxhash.xxh3_64_intdigest(struct.pack("<IQ", len(key), BLOCK_BYTES) + key + block, seed) == check:
            whole.add(number)
            if block != payload(number).tobytes():
                wrong.add(number)
    return whole, wrong


def ranges(lines, letter):
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) == 3 and fields[0] == letter and line.endswith("\n"):
            found.extend(range(int(fields[1]), int(fields[2]) + 1))
    return found


def run(folder, num_kills, seed):
    draw = random.Random(seed)
    names = ("kills", "resets", "begun", "done", "verified", "wrong", "missing", "stale", "above_capacity", "torn")
    names += ("unlike_own_checker",)
    counts = dict.fromkeys(names, 0)
    begun, done, perhaps_gone, gone = [], set(), set(), -1
    for _ in range(num_kills):
        reader, writer = os.pipe()
        first = len(begun)
        child_seed = draw.random()
        child = os.fork()
        if not child:
            try:
                os.close(reader)
                write_until_killed(folder, first, writer, random.Random(child_seed))
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.readline() == "R 0 0\n"
            time.sleep(draw.random() * 0.25)
            os.kill(child, signal.SIGKILL)
            lines = pipe.readlines()
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the writer failed by itself"
        # A number whose store began but did not end may be used again; no number is skipped.
        begun_now = ranges(lines, "B")
        begun += begun_now
        done.update(ranges(lines, "D"))
        resets = [int(line.split()[2]) for line in lines if line.startswith("X ") and line.endswith("\n")]
        gone = max([gone, *resets])
        counts["resets"] += len(resets)
        counts["kills"] += 1
        counts["above_capacity"] += directory_bytes(Path(folder)) > CAPACITY_BYTES
        whole, wrong = blocks_on_disk(Path(folder))
        counts["wrong"] += len(wrong)
        host_blocks, tier = open_tier(folder)
        num_held = tier.stats().num_held
        counts["above_capacity"] += num_held > NUM_BLOCKS
        # Eviction skips blocks that are being loaded, and evicts younger ones instead.
        youngest = begun[-(NUM_BLOCKS - NUM_JOBS * LOAD_BLOCKS) :]
        must_hold = {n for n in youngest if n in done and n not in perhaps_gone and n > gone}
        held = [n for n in begun if tier.lookup([key_of(n)])]
        if sum(line.startswith("Y ") for line in lines) > len(resets):
            # Killed in `reset`: the blocks may be there or not, now and after later kills.
            must_hold.clear()
            perhaps_gone.update(done.difference(held))
        counts["stale"] += sum(n <= gone for n in held)
        assert len(held) == num_held, "the tier holds blocks that were never begun"
        counts["missing"] += len(must_hold.difference(held))
        all_served = set()
        for start in range(0, len(held), len(host_blocks)):
            batch = held[start : start + len(host_blocks)]
            host_blocks[:] = 0
            assert tier.submit_load(start + 1, [key_of(n) for n in batch], list(range(len(batch))))
            while not (results := [result for result in tier.get_finished() if result.job_id is not None]):
                time.sleep(0.0005)
            served = set(results[0].done)
            for block_id, n in enumerate(batch):
                if key_of(n) in served:
                    all_served.add(n)
                    counts["verified"] += 1
                    counts["wrong"] += not np.array_equal(host_blocks[block_id], payload(n))
                else:
                    counts["torn"] += 1
                    counts["missing"] += n in must_hold
        tier.shutdown()
        counts["unlike_own_checker"] += len(whole ^ all_served)
    counts["begun"], counts["done"] = len(begun), len(done)
    return counts


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
