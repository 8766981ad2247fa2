"""A file system in memory whose calls fail, are truncated, lie or hang, as lines on standard input command.

Run as root: ``python tests/isolated/fuse_faults.py MOUNTPOINT SEED``; prints "mounted". Lines: ``fault OP SHARE KIND``
with OP one of read, write, fsync, open, lookup or all, and KIND an errno's name, short, flip or hang; ``clear`` ends
all faults and continues calls that hang; ``end``.
"""

import contextlib
import ctypes
import errno
import os
import random
import select
import signal
import stat
import struct
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
MAX_WRITE = 1 << 20
DIRECT_IO = 1
(LOOKUP, FORGET, GETATTR, SETATTR, MKNOD, MKDIR, UNLINK, RMDIR, RENAME) = (1, 2, 3, 4, 8, 9, 10, 11, 12)
(OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT) = (14, 15, 16, 17, 18, 20, 25, 26)
(OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, ACCESS, CREATE, INTERRUPT) = (27, 28, 29, 30, 34, 35, 36)
(DESTROY, BATCH_FORGET, FALLOCATE, RENAME2) = (38, 42, 43, 45)
FAULT_OF = {READ: "read", WRITE: "write", FSYNC: "fsync", FSYNCDIR: "fsync", OPEN: "open", CREATE: "open"}
FAULT_OF |= {LOOKUP: "lookup", GETATTR: "lookup", OPENDIR: "lookup"}


class Node:
    def __init__(self, number, mode):
        self.number = number
        self.mode = mode
        self.body = bytearray()
        self.children = {}


class Refused(Exception):
    """Answer with this errno."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


class FileSystem:
    """Files in memory; `faults` holds a share and a kind for each operation."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.nodes = {1: Node(1, stat.S_IFDIR | 0o700)}
        self.faults = {}
        self.waiting = []

    def attributes(self, node):
        size = len(node.body)
        times = (int(time.time()),) * 3
        owner = (os.getuid(), os.getgid())
        fields = (node.number, size, -(-size // 512), *times, 0, 0, 0, node.mode, 1, *owner, 0, 4096, 0)
        return struct.pack("<6Q3I7I", *fields)

    def entry(self, node):
        return struct.pack("<4Q2I", node.number, 0, 0, 0, 0, 0) + self.attributes(node)

    def child(self, parent, name):
        try:
            return self.nodes[parent].children[name]
        except KeyError:
            raise Refused(errno.ENOENT) from None

    def make(self, parent, name, mode):
        if name in self.nodes[parent].children:
            raise Refused(errno.EEXIST)
        node = Node(max(self.nodes) + 1, mode)
        self.nodes[node.number] = self.nodes[parent].children[name] = node
        return node

    def fault(self, operation):
        for name in (FAULT_OF.get(operation, ""), "all"):
            share, kind = self.faults.get(name, (0.0, ""))
            if name and self.draw.random() < share:
                return kind
        return ""

    def answer(self, operation, number, body):
        """Return the body of the reply, or None if it has no body."""
        kind = self.fault(operation)
        if kind and kind not in ("short", "flip", "hang"):
            raise Refused(getattr(errno, kind))
        node = self.nodes.get(number)
        if operation == INIT:
            _, minor, readahead, _ = struct.unpack_from("<4I", body)
            return struct.pack(
                "<4I2H2I2H8I", 7, min(minor, 31), readahead, 1 << 5, 16, 12, MAX_WRITE, 1, 0, 0, *[0] * 8
            )
        if operation == LOOKUP:
            return self.entry(self.child(number, body.rstrip(b"\0")))
        if operation == GETATTR:
            return struct.pack("<Q2I", 0, 0, 0) + self.attributes(node)
        if operation == SETATTR:
            valid, _, _, size = struct.unpack_from("<2I2Q", body)
            if valid & 1:
                node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(struct.unpack_from("<I", body, 68)[0])
            if valid & 8:
                del node.body[size:]
                node.body.extend(bytes(size - len(node.body)))
            return struct.pack("<Q2I", 0, 0, 0) + self.attributes(node)
        if operation == MKDIR:
            mode = struct.unpack_from("<I", body)[0]
            return self.entry(self.make(number, body[8:].rstrip(b"\0"), stat.S_IFDIR | mode))
        if operation == CREATE:
            mode = struct.unpack_from("<2I", body)[1]
            return self.entry(self.make(number, body[16:].rstrip(b"\0"), mode)) + struct.pack("<Q2I", 0, DIRECT_IO, 0)
        if operation in (UNLINK, RMDIR):
            self.child(number, body.rstrip(b"\0"))
            del node.children[body.rstrip(b"\0")]
            return b""
        if operation in (RENAME, RENAME2):
            target = self.nodes[struct.unpack_from("<Q", body)[0]]
            old, new = body[8 if operation == RENAME else 16 :].rstrip(b"\0").split(b"\0")
            target.children[new] = self.child(number, old)
            if (target, new) != (node, old):
                del node.children[old]
            return b""
        if operation == OPEN:
            return struct.pack("<Q2I", 0, DIRECT_IO, 0)
        if operation == OPENDIR:
            return struct.pack("<Q2I", 0, 0, 0)
        if operation == READ:
            _, offset, size = struct.unpack_from("<2QI", body)
            piece = bytes(node.body[offset : offset + size])
            if kind == "short" and len(piece) > 1:
                piece = piece[: self.draw.randrange(1, len(piece))]
            elif kind == "flip" and piece:
                at = self.draw.randrange(len(piece))
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            return piece
        if operation == WRITE:
            _, offset, size = struct.unpack_from("<2QI", body)
            piece = body[40 : 40 + size]
            if kind == "short" and size > 1:
                piece = piece[: self.draw.randrange(1, size)]
            elif kind == "flip":
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            node.body.extend(bytes(max(0, offset + len(piece) - len(node.body))))
            node.body[offset : offset + len(piece)] = piece
            return struct.pack("<2I", len(piece), 0)
        if operation == STATFS:
            return struct.pack("<5Q4I24x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, 0)
        if operation == READDIR:
            _, offset, size = struct.unpack_from("<2QI", body)
            listed = b""
            for i, (name, child) in enumerate(list(node.children.items())[offset:], offset + 1):
                one = struct.pack("<2Q2I", child.number, i, len(name), child.mode >> 12) + name
                one += bytes(-len(one) % 8)
                if len(listed) + len(one) > size:
                    break
                listed += one
            return listed
        if operation in (FSYNC, FSYNCDIR, FLUSH, RELEASE, RELEASEDIR, ACCESS, DESTROY):
            return b""
        if operation in (FORGET, BATCH_FORGET, INTERRUPT):
            return None
        raise Refused(errno.ENOSYS)

    def command(self, line):
        words = line.split()
        if words[0] == "fault":
            self.faults[words[1]] = (float(words[2]), words[3])
        elif words[0] == "clear":
            self.faults.clear()


def reply(device, unique, number, body):
    # The caller may have been killed, or the file system unmounted.
    with contextlib.suppress(OSError):
        os.write(device, struct.pack("<IiQ", 16 + len(body), -number, unique) + body)


def serve(device, file_system, commands):
    def handle(request):
        _, operation, unique, node = struct.unpack_from("<2I2Q", request)
        try:
            body = file_system.answer(operation, node, request[40:])
        except Refused as error:
            reply(device, unique, error.number, b"")
        else:
            if body is not None:
                reply(device, unique, 0, body)

    pending = b""
    while True:
        readable, _, _ = select.select([device, commands], [], [])
        if commands in readable:
            pending += os.read(commands, 4096)
            *lines, pending = pending.split(b"\n")
            for line in lines or [b"end"]:
                if line == b"end":
                    return
                file_system.command(line.decode())
                if line == b"clear":
                    for request in file_system.waiting:
                        handle(request)
                    file_system.waiting.clear()
                print("ok", flush=True)
        if device in readable:
            request = os.read(device, MAX_WRITE + 4096)
            operation = struct.unpack_from("<I", request, 4)[0]
            share, kind = file_system.faults.get(FAULT_OF.get(operation, ""), (0.0, ""))
            if kind == "hang" and file_system.draw.random() < share:
                file_system.waiting.append(request)
            else:
                handle(request)


def main(path, seed):
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},max_read={MAX_WRITE}"
    if LIBC.mount(b"kvcache", path.encode(), b"fuse.kvcache", 6, options.encode()):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    # Leave no mount behind, however the test ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        print("mounted", flush=True)
        serve(device, FileSystem(seed), sys.stdin.fileno())
    finally:
        LIBC.umount2(path.encode(), 2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
