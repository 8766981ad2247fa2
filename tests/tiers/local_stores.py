"""Stores in this process, for fast tests: the commands and calls that tiers and their tests make, on a dict.

The same tests run over real stores as slow ones, which shows that these answer alike.
"""

import binascii
import ctypes
import multiprocessing
import random
import re
import socket
import time
from collections import Counter, defaultdict
from contextlib import suppress
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import SimpleNamespace
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape, unescape

NUM_SLOTS = 16384


class Faulty:
    """A store that answers some questions, `num_faults` so far, with bytes, a number or a function of the question."""

    _fault = None
    is_over = Event()
    num_faults = 0

    def spoil(self, act, *kinds, name=None, times=1 << 30):
        """Let `act` answer the next `times` questions of these kinds and this name, or of all.

        With ``"hang"``, their answers come after `heal`.
        """
        self.is_over, self.num_faults = Event(), 0
        self._fault = act, kinds, name, iter(range(times))

    def heal(self):
        self._fault = None
        self.is_over.set()

    def fault_of(self, kind, *names):
        """Return what answers a question in the place of the store, or None."""
        act, kinds, name, numbers = self._fault or (None, (), None, iter(()))
        if (kinds and kind not in kinds) or (name and name not in names) or next(numbers, None) is None:
            return None
        self.num_faults += 1
        if act == "hang":
            self.is_over.wait()
            return None
        return act


class LocalValkey(Faulty):
    """A Valkey server on loopback; `calls` counts its commands."""

    def __init__(self):
        self.port = 0
        self.password = b""
        self.slots, self.peers = range(NUM_SLOTS), [self]
        self.values, self.ttls_ms = {}, {}
        self.calls = Counter()
        self._lock = Lock()
        self._connections = set()
        self.start()

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def place(self):
        return {"url": self.url} | ({"cluster": True} if len(self.peers) > 1 else {})

    def start(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def kill(self):
        """Lose all values and connections; `start` opens the same port again."""
        for end in (self._listener, *self._connections):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.values.clear()

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                end, _ = listener.accept()
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.add(end)
                Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end):
        with end, end.makefile("rb") as stream, suppress(OSError):
            while line := stream.readline():
                command = []
                for _ in range(int(line[1:])):
                    num_bytes = int(stream.readline()[1:])
                    command.append(stream.read(num_bytes + 2)[:-2])
                act = self.fault_of(command[0].decode(), *command[1:])
                end.sendall((act(command) if callable(act) else act) or self.answer(command))
        self._connections.discard(end)

    def answer(self, command):
        """Execute a command, and return the bytes of its answer."""
        name, *arguments = command
        method = getattr(self, f"_{name.decode().lower()}", None)
        with self._lock:
            self.calls[name] += 1
            if method is not None and name in (b"GET", b"SET", b"EXISTS", b"TOUCH", b"PEXPIRE", b"UNLINK"):
                slot = binascii.crc_hqx(arguments[0], 0) % NUM_SLOTS
                if slot not in self.slots:
                    owner = next(peer for peer in self.peers if slot in peer.slots)
                    return b"-MOVED %d 127.0.0.1:%d\r\n" % (slot, owner.port)
            return encoded("+OK" if method is None else method(*arguments))

    def _get(self, name):
        value = self.values.get(name)
        return value if value is None or isinstance(value, bytes) else "-WRONGTYPE not a string"

    def _set(self, name, value, *options):
        if b"NX" in options and name in self.values:
            return None
        self.values[name] = value
        self.ttls_ms[name] = int(options[options.index(b"PX") + 1]) if b"PX" in options else None
        return "+OK"

    def _rpush(self, name, value):
        self.values[name] = [value]
        return 1

    def _exists(self, *names):
        return sum(name in self.values for name in names)

    _touch = _exists

    def _pexpire(self, name, ttl_ms):
        self.ttls_ms[name] = int(ttl_ms)
        return int(name in self.values)

    def _unlink(self, name):
        return int(self.values.pop(name, None) is not None)

    _del = _unlink

    def _scan(self, cursor, *options):
        pattern = options[options.index(b"MATCH") + 1] if b"MATCH" in options else b"*"
        start, count = int(cursor), int(options[options.index(b"COUNT") + 1]) if b"COUNT" in options else 10
        if not start:
            self.scanned = list(self.values)
        part, end = self.scanned[start : start + count], start + count
        names = [name for name in part if name in self.values and fnmatchcase(name, pattern)]
        return [b"%d" % (end if end < len(self.scanned) else 0), names]

    def _auth(self, *arguments):
        is_known = arguments[:-1] in ((), (b"default",)) and arguments[-1] == self.password
        return "+OK" if is_known else "-WRONGPASS invalid username-password pair"

    def _client(self, question, *_):
        return 7 if question == b"ID" else b"id=7 addr=127.0.0.1:8\nid=9 addr=127.0.0.1:9\n"

    def _flushall(self):
        self.values.clear()
        return "+OK"

    def _dbsize(self):
        return len(self.values)

    def _command(self):
        return [[name, -2, [], 1, 1, 1] for name in (b"get", b"set", b"unlink")]

    def _cluster(self, _):
        nodes = [[peer.slots, [b"127.0.0.1", peer.port, b"%d" % peer.port]] for peer in self.peers]
        replicas = [node for slots, node in nodes if not slots]
        return [[slots[0], slots[-1], node, *replicas] for slots, node in nodes if slots]


def local_cluster():
    """Return three servers that hold a third of the slots each."""
    servers = [LocalValkey() for _ in range(3)]
    for number, server in enumerate(servers):
        server.peers, server.slots = servers, range(number * 5462, min(NUM_SLOTS, number * 5462 + 5462))
    return servers


def encoded(answer):
    """Return an answer in the servers' protocol; a str is a line as it is sent."""
    if isinstance(answer, str):
        return answer.encode() + b"\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(encoded, answer))
    return b"$-1\r\n" if answer is None else b"$%d\r\n%b\r\n" % (len(answer), answer)


STORES = defaultdict(dict)
"""The values of Mooncake's stores, by master and tenant."""
NO_SPACE, BAD_SIZE, NOT_READY, NOT_FOUND, EXISTS = -200, -600, -703, -704, -705


class LocalMooncake:
    """A client of Mooncake, whose stores are dicts of this process; numbers of `faults` are returned by its calls."""

    faults = Faulty()

    def setup(self, host, metadata, lend_bytes, buffer_bytes, protocol, device, master, tenant_id="default"):
        self.values, self.regions = STORES[master, tenant_id], {}
        return 0

    def register_buffer(self, address, num_bytes):
        self.regions[address] = num_bytes
        return 0

    def unregister_buffer(self, address):
        del self.regions[address]

    def _read(self, address, num_bytes):
        self._check(address, num_bytes)
        return ctypes.string_at(address, num_bytes)

    def _check(self, address, num_bytes):
        parts = self.regions.items()
        assert any(start <= address and address + num_bytes <= start + size for start, size in parts), "not registered"

    def _fault_of(self, kind, name, answer):
        number = self.faults.fault_of(kind, name.encode("latin-1"))
        return answer if number is None else number

    def put_from(self, name, address, num_bytes, config=None):
        return self.batch_put_from_multi_buffers([name], [[address]], [[num_bytes]], config)[0]

    def upsert_from(self, name, address, num_bytes, config):
        self.values[name] = self._read(address, num_bytes)
        return 0

    def get_into(self, name, address, num_bytes):
        return self.batch_get_into_multi_buffers([name], [[address]], [[num_bytes]])[0]

    def batch_put_from_multi_buffers(self, names, addresses, sizes, config):
        answers = []
        for name, *parts in zip(names, addresses, sizes, strict=True):
            answers.append(self._fault_of("put", name, EXISTS if name in self.values else 0))
            if answers[-1] == 0:
                self.values[name] = b"".join(map(self._read, *parts))
        return answers

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        answers = []
        for name, starts, lengths in zip(names, addresses, sizes, strict=True):
            value = self.values.get(name)
            num_bytes = NOT_FOUND if value is None else BAD_SIZE if len(value) > sum(lengths) else len(value)
            answers.append(self._fault_of("get", name, num_bytes))
            for start, length in zip(starts, lengths, strict=True) if answers[-1] >= 0 else ():
                self._check(start, length)
                ctypes.memmove(start, value[:length], min(length, len(value)))
                value = value[length:]
        return answers

    def batch_is_exist(self, names):
        return [self._fault_of("exist", name, int(name in self.values)) for name in names]

    def get_size(self, name):
        return len(self.values[name]) if name in self.values else NOT_FOUND

    def remove(self, name, force):
        return NOT_FOUND if self.values.pop(name, None) is None else 0

    def batch_remove(self, names, force):
        return [self._fault_of("remove", name, 0) or self.remove(name, force) for name in names]

    def remove_by_regex(self, regex, force):
        return sum(self.remove(name, force) == 0 for name in list(self.values) if re.match(regex, name))

    def close(self):
        self.regions.clear()


MOONCAKE = SimpleNamespace(
    MooncakeDistributedStore=LocalMooncake,
    ReplicateConfig=SimpleNamespace,
    ObjectDataType=SimpleNamespace(KVCACHE="kvcache"),
    SoftPinAction=SimpleNamespace(ENABLE="enable"),
)


class LocalS3(Faulty):
    """A server of buckets on loopback; `calls` counts its requests by method.

    A fault is a function of the request, which answers by ``request.reply`` and the like.
    """

    def __init__(self, *buckets):
        self.buckets = {name: {} for name in buckets}
        self.calls = Counter()
        self.lock = Lock()
        self._server = None
        self.port = 0
        self.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def place(self):
        """The options of a tier in the first bucket."""
        return {"bucket": next(iter(self.buckets)), "endpoint": self.endpoint}

    @property
    def objects(self):
        return next(iter(self.buckets.values()))

    values = objects

    def start(self):
        handler = type("Handler", (_S3Request,), {"store": self})
        self._server = _S3Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self):
        """Refuse connections, until `start` opens the same port again."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()


class _S3Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *arguments):
        self._connections = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address):
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self):
        for end in list(self._connections):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """Connections end in many ways here."""


class _S3Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # One segment for the head of an answer.
    wbufsize = -1

    def log_message(self, *arguments):
        """Write nothing."""

    def _handle(self):
        path, _, self.query = self.path.partition("?")
        bucket, _, self.key = unquote(path).lstrip("/").partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.store.calls[self.command] += 1
        kind = "LIST" if "list-type" in self.query else self.command
        if (act := self.store.fault_of(kind, self.key.replace("/", ":").encode())) is not None:
            act(self)
            return
        self.objects = self.store.buckets.get(bucket)
        if self.objects is None:
            self.refuse(404, "NoSuchBucket")
            return
        with self.store.lock:
            answer = getattr(self, f"_{self.command.lower()}")
            answer()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def reply(self, status, body=b"", num_bytes=None, **headers):
        """Answer with a body, of which `num_bytes` are announced."""
        self.send_response(status)
        headers = {"ETag": '"1"', "Last-Modified": "Fri, 27 Nov 2026 02:00:00 GMT", **headers}
        for name, value in {**headers, "Content-Length": len(body) if num_bytes is None else num_bytes}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def refuse(self, status, code):
        self.reply(status, f"<Error><Code>{code}</Code><Message>as a test wants it</Message></Error>".encode())

    def hang_up(self):
        """End the connection without an answer, or in the middle of one."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _get(self):
        if "list-type=2" in self.query:
            self._list(dict(parse_qsl(self.query)))
        elif self.key in self.objects:
            self.reply(200, self.objects[self.key])
        else:
            self.refuse(404, "NoSuchKey")

    def _head(self):
        if self.key in self.objects:
            self.reply(200, num_bytes=len(self.objects[self.key]))
        else:
            self.reply(404)

    def _put(self):
        if self.headers.get("If-None-Match") == "*" and self.key in self.objects:
            self.refuse(412, "PreconditionFailed")
        else:
            self.objects[self.key] = self.body
            self.reply(200)

    def _delete(self):
        self.objects.pop(self.key, None)
        self.reply(204)

    def _post(self):
        keys = re.findall(r"<Key>(.*?)</Key>", self.body.decode())
        for key in keys:
            self.objects.pop(unescape(key), None)
        entries = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.reply(200, f"<DeleteResult>{entries}</DeleteResult>".encode())

    def _list(self, options):
        start = options.get("continuation-token", "")
        keys = sorted(key for key in self.objects if key.startswith(options.get("prefix", "")) and key > start)
        size = int(options.get("max-keys", 1000))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-27T02:00:00.000Z</LastModified><ETag>1</ETag>"
            f"<Size>{len(self.objects[key])}</Size></Contents>"
            for key in keys[:size]
        )
        token = f"<NextContinuationToken>{escape(keys[size - 1])}</NextContinuationToken>" if keys[size:] else ""
        text = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{token}{entries}"
        self.reply(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())


def refusing(status, code):
    """Return a fault of S3 that refuses a request."""
    return lambda request: request.refuse(status, code)


def replying(status, *body):
    """Return a fault of S3 that answers with another status or body than the store does."""
    return lambda request: request.reply(status, *(body or [request.store.objects[request.key]]))


def announcing(status, num_bytes=1 << 16, announced=1 << 40):
    """Return a fault of S3 that announces more bytes than it sends."""

    def act(request):
        request.reply(status, bytes(num_bytes), announced)
        request.hang_up()

    return act


class Spawned:
    """A process that runs ``target(pipe, *arguments)``, which sends `greeting` first; it ends with this one."""

    def __init__(self, target, *arguments):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        self.greeting = self.pipe.recv()

    def close(self):
        self._process.kill()
        self._process.join()


class FaultyS3(Spawned):
    """A `LocalS3` in a process of its own, which spoils a share of its answers; `num_faults` counts them."""

    def __init__(self, share, seed=0):
        self._num_faults = multiprocessing.get_context("spawn").Value("q", 0)
        super().__init__(_serve_faults, self._num_faults, share, seed)
        self.place = self.greeting

    @property
    def num_faults(self):
        return self._num_faults.value


def _serve_faults(pipe, num_faults, share, seed):
    server, dice = LocalS3("blocks"), random.Random(seed)

    def value_of(request):
        # The value of this object or of another one, whole or cut.
        values = list(server.objects.values()) or [b"nothing"]
        value = bytearray(server.objects.get(request.key) or dice.choice(values))
        value[dice.randrange(len(value))] ^= 1 << dice.randrange(8)
        return dice.choice((bytes(value), bytes(value[: dice.randrange(len(value))]), dice.choice(values), value * 2))

    def wait(request):
        time.sleep(0.6)
        request.reply(200, value_of(request))

    faults = (
        *(refusing(403, code) for code in ("AccessDenied", "RequestTimeTooSkewed")),
        *(refusing(*code) for code in ((503, "SlowDown"), (500, "InternalError"), (404, "NoSuchBucket"))),
        replying(404, b""),
        *[lambda request: request.reply(200, value_of(request))] * 3,
        lambda request: request.reply(200, dice.randbytes(dice.randrange(1 << 14))),
        lambda request: announcing(dice.choice((200, 404, 412, 503)))(request),
        lambda request: announcing(200, dice.randrange(1 << 14), 1 << 16)(request),
        lambda request: request.hang_up(),
        wait,
    )

    def act(request):
        with num_faults.get_lock():
            num_faults.value += 1
        with suppress(OSError):
            dice.choice(faults)(request)

    # The epoch is read once; without it nothing would be stored at all.
    server.fault_of = lambda _, name: None if name.endswith(b":epoch") or dice.random() >= share else act
    pipe.send(server.place)
    with suppress(EOFError):
        pipe.recv()
