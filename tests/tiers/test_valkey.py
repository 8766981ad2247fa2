"""The Valkey tier on a server in this process and, as slow tests, on real ones."""

import importlib
import io
import shlex
import shutil
import subprocess
from functools import partial
from itertools import cycle, islice
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from local_stores import NUM_SLOTS, LocalValkey, local_cluster
from stores import (
    KEYS,
    Clock,
    blocks,
    found,
    free_port,
    load,
    store,
    until,
    wait_for_reset,
)
from valkey import Valkey

from kvcache.tiers import channel, valkey
from kvcache.tiers.channel import WireError
from kvcache.tiers.valkey import PASSWORD_VARIABLE, ValkeyOptions, ValkeyTier, clear_server
from kvcache.tiers.valkey_wire import ServerChannel

BLOCK_BYTES = 4096
DOCUMENTED = "~kvcache:* +get +set +exists +touch +pexpire +unlink +scan +cluster|slots +command"


@pytest.fixture
def local():
    server = LocalValkey()
    yield server
    server.kill()


def open_tier(opened, url, block_bytes=BLOCK_BYTES, fingerprint=None, **options):
    tier = ValkeyTier(ValkeyOptions(url=url, **options), blocks(64, block_bytes), fingerprint)
    opened.append(tier)
    return tier


@pytest.mark.parametrize("ttl_s", [None, 60.0, 1e-4])
def test_block_of_others_is_renewed_only(local, opened, ttl_s):
    first, second = (open_tier(opened, local.url, ttl_s=ttl_s) for _ in range(2))
    store(first, KEYS[:8])
    ttl_ms = None if ttl_s is None else max(1, ttl_s * 1000)
    names = [first.store_name(key) for key in KEYS[:12]]
    local.ttls_ms.update(dict.fromkeys(names[:8], 1))
    local.calls.clear()
    # Neither stored by this engine nor refused to it; and known to be there without another question.
    result = store(second, KEYS[4:12])
    assert (sorted(result.done), result.failed, result.error) == (KEYS[8:12], [], "")
    # One command for all blocks if none of them or all are held.
    asked = {b"TOUCH": 1, b"EXISTS": 8} if ttl_s is None else {b"PEXPIRE": 8}
    assert local.calls == {**asked, b"SET": 4}
    assert [local.ttls_ms[name] for name in names] == [1] * (4 if ttl_s else 8) + [ttl_ms] * (8 if ttl_s else 4)
    assert second.lookup(KEYS[4:12]) == 8
    assert second.stats().stored_blocks == 4


def test_large_blocks_are_asked_for_once(local, opened):
    # Eight blocks are a window of a store, and two of a load.
    tier = open_tier(opened, local.url, 1 << 19, num_threads=1)
    keys = KEYS[:9]
    local.calls.clear()
    assert sorted(store(tier, keys).done) == keys
    held = set(keys[:4])
    for key in keys[4:]:
        del local.values[tier.store_name(key)]
    assert set(load(tier, keys).done) == held
    assert [local.calls[name] for name in (b"TOUCH", b"EXISTS", b"SET", b"GET")] == [2, 0, 9, 9]
    tier.shutdown()
    until(lambda: not local._connections)


class SlowSocket:
    """A socket that moves `num_bytes` at a time, which takes `step_s`; its peer answers ":1" again and again."""

    def __init__(self, clock, step_s, num_bytes=1):
        self._clock, self._step_s, self._num_bytes = clock, step_s, num_bytes
        self._answers, self.sent = cycle(b":1\r\n"), b""

    def settimeout(self, timeout_s):
        self._timeout_s = timeout_s

    def setsockopt(self, *_):
        """Have no options."""

    def _move(self, data):
        self._clock.now_s += min(self._step_s, self._timeout_s)
        if self._step_s > self._timeout_s:
            raise TimeoutError
        return data[: self._num_bytes]

    def recv_into(self, target):
        part = self._move(target)
        part[:] = bytes(islice(self._answers, len(part)))
        return len(part)

    def sendmsg(self, buffers):
        part = self._move(b"".join(buffers))
        self.sent += part
        return len(part)

    def sendall(self, data):
        for _ in range(0, len(data), self._num_bytes):
            self._move(data)
        self.sent += data


@pytest.fixture(params=[True, False])
def slow_socket(request, monkeypatch):
    """The clock and the type of plain sockets, or of others."""
    clock = Clock()
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=clock))
    kind = SlowSocket if request.param else None
    monkeypatch.setattr(channel, "socket", SimpleNamespace(socket=kind, SOL_SOCKET=0, SO_RCVLOWAT=0))
    return partial(SlowSocket, clock), clock


def test_partial_sends_go_on(slow_socket):
    buffers = [np.random.default_rng(0).bytes(n) for n in (10, 1000, 3, 500, *[1] * 600)]
    end = slow_socket[0](0.0, 7)
    ServerChannel(end, 5.0).send(buffers)
    assert end.sent == b"".join(buffers)


@pytest.mark.parametrize("step_s", [1.25, 1.5, 4.5, 5.5])
@pytest.mark.parametrize("use", [ServerChannel.read_count, lambda server: server.send([b"x", b"yz", b"w"])])
def test_deadline_is_of_batch_or_answer(slow_socket, use, step_s):
    """Each of them is four bytes. Slow bytes do not extend it, and neither does a stall near its end."""
    make, clock = slow_socket
    server = ServerChannel(make(step_s), 5.0)
    if step_s > 1.25:
        with pytest.raises(WireError, match=r"took (more than|nothing for) 5 s"):
            use(server)
        assert clock.now_s == pytest.approx(105.0)
        return
    for number in range(1, 4):
        use(server)
        assert clock.now_s == 100.0 + 5.0 * number


def test_long_deletion_goes_on_later(local, opened, monkeypatch):
    """A large server: maintenance takes a part of its scan only, and a later reset does not end the deletion."""
    monkeypatch.setattr(valkey, "_DELETE_S", 0)
    tier = open_tier(opened, local.url)
    others = {b"other:%d" % i: b"" for i in range(4500)}
    local.values.update(others)
    for job_id in range(2):
        tier.reset()
        wait_for_reset(tier)
        store(tier, KEYS, job_id)
    private = [name for name in local.values if name.startswith(tier.prefix) and name != tier.epoch_name]
    assert len(private) == 2 * len(KEYS)
    tier.reset("v8")
    wait_for_reset(tier)
    assert local.calls[b"SCAN"] == 0
    store(tier, KEYS, 2)
    for _ in range(10):
        tier._life.maintain(60)
    assert local.values.keys() == others.keys() | {tier.epoch_name, *map(tier.store_name, KEYS)}
    assert local.calls[b"SCAN"] == 2 * 5


def test_stall_of_cluster_ends_job(three_local, opened):
    """A server that stops costs a job one time limit; the next job follows the cluster."""
    tier = open_tier(opened, three_local[0].url, cluster=True, timeout_s=0.5, num_threads=1)
    store(tier, KEYS)
    third = three_local[2]
    third.spoil("hang")
    keys = [key for key in KEYS if tier.store_name(key) in third.values][:1]
    assert "took more than 0.5 s" in load(tier, keys).error
    assert third.num_faults == 1
    three_local[1].slots, third.slots = range(5462, NUM_SLOTS), range(0)
    result = load(tier, keys, job_id=3)
    assert (result.failed, result.error) == (keys, "")
    third.heal()


def test_password_from_environment_is_not_shown(local, opened, monkeypatch):
    local.password = b"sesame"
    with pytest.raises(ValueError, match="refuses the credentials") as raised:
        open_tier(opened, f"valkey://:opensesame@127.0.0.1:{local.port}")
    assert "opensesame" not in str(raised.value)
    monkeypatch.setenv(PASSWORD_VARIABLE, "sesame")
    tier = open_tier(opened, local.url)
    assert (store(tier, KEYS[:2]).failed, "sesame" in repr(tier)) == ([], False)
    monkeypatch.setenv(PASSWORD_VARIABLE, "not that of this server")
    assert found(open_tier(opened, local.url, username="default", password="sesame"), KEYS[:2]) == 2
    with pytest.raises(ValueError, match="refuses the credentials"):
        open_tier(opened, local.url, username="nobody", password="sesame")


PASSING = """
    ValkeyError ConnectionError TimeoutError BusyLoadingError InvalidResponse ResponseError DataError PubSubError
    WatchError NoScriptError OutOfMemoryError ExecAbortError ReadOnlyError NoPermissionError ModuleError LockError
    LockNotOwnedError ChildDeadlockedError ValkeyClusterException ClusterError ClusterDownError AskError
    TryAgainError ClusterCrossSlotError MovedError MasterDownError SlotNotCoveredError MaxConnectionsError
    MasterNotFoundError SlaveNotFoundError
"""


def errors_of_client():
    """Return the exceptions that the client's package defines, by name."""
    modules = [
        importlib.import_module(f"valkey.{name}") for name in ("exceptions", "sentinel", "cluster", "client", "lock")
    ]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {cls.__name__: cls for cls in classes if issubclass(cls, Exception) and cls.__module__.startswith("valkey")}


def test_every_error_of_client_is_known(opened, monkeypatch):
    """Refused credentials end a start, also if a cluster's client wraps them. After the others, an engine starts."""
    errors, refused = errors_of_client(), {cls.__name__ for cls in valkey.REFUSED}
    assert (set(errors), refused & set(PASSING.split())) == ({*PASSING.split(), *refused}, set())
    assert all(issubclass(cls, valkey.CLIENT_ERRORS) for cls in errors.values())
    for name, cls in errors.items():
        # Some take a redirection.
        error = cls("1 host:2")
        wrapped = errors["ValkeyClusterException"]("no node")
        wrapped.__cause__ = error
        for raised in (error, wrapped):
            monkeypatch.setattr(valkey, "_client_of", Mock(side_effect=raised))
            assert "cannot be used" in ValkeyTier.unavailable_reason(ValkeyOptions(url="valkey://host"))
            assert "is unknown" in ValkeyTier.doubt(ValkeyOptions(url="valkey://host"))
            if name in refused:
                with pytest.raises(ValueError, match="host refuses the credentials"):
                    ValkeyTier(ValkeyOptions(url="valkey://host"), blocks())
            else:
                assert store(open_tier(opened, "valkey://host"), KEYS[:1]).error.startswith("OSError: host: "), name
                opened.pop().shutdown()


def test_documented_rights_suffice_in_cluster(make_valkey, opened, tmp_path):
    options = ("--cluster-config-file", str(tmp_path / "nodes.conf"), "--cluster-port", str(free_port()))
    one = make_valkey("--cluster-enabled", "yes", *options)
    # A user of the documented commands has blocks there, once it has all slots.
    admin = Valkey(port=one.port)
    assert "cannot be used" in ValkeyTier.unavailable_reason(ValkeyOptions(url=one.url, cluster=True))
    admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    wait_for_sign([admin], b"cluster_state:ok")
    for rules in (DOCUMENTED, DOCUMENTED.replace("+scan", "")):
        admin.execute_command("ACL", "SETUSER", "engine", "reset", "on", ">sesame", *rules.split())
        url = f"valkey://engine:sesame@127.0.0.1:{one.port}"
        assert ValkeyTier.unavailable_reason(ValkeyOptions(url=url, cluster=True)) == ""
        tier = open_tier(opened, url, cluster=True)
        use_and_reset(tier)
        assert tier.stats().undeleted_blocks == (0 if "+scan" in rules else 16)
    with pytest.raises(ValueError, match="refuses the credentials"):
        open_tier(opened, url.replace("sesame", "open"), cluster=True)
    admin.close()


def use_and_reset(tier):
    for number in range(3):
        result = store(tier, KEYS[:8], 10 + number)
        assert (result.failed, result.error, load(tier, KEYS[:8], 20 + number).done) == ([], "", KEYS[:8])
        tier.reset()
        wait_for_reset(tier)
        assert tier._life.maintain(60)


@pytest.fixture
def three_local():
    servers = local_cluster()
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(params=["three_local", pytest.param("real_cluster", marks=pytest.mark.slow)])
def cluster(request):
    """Three servers that hold a third of the slots each."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def real_cluster(make_valkey, tmp_path):
    servers = []
    for number in range(3):
        options = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / f"nodes-{number}.conf")]
        # On a loaded machine a server may be silent for seconds; the others are not to take it for dead.
        options += ["--cluster-node-timeout", "120000"]
        # The bus has a port of its own, 10,000 above by default, which may be no port.
        servers.append(make_valkey(*options, "--cluster-port", str(free_port())))
    clients = [Valkey(port=server.port) for server in servers]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * 5462, min(16383, number * 5462 + 5461))
        bus_port = client.config_get("cluster-port")["cluster-port"]
        for other in clients:
            other.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[number].port, bus_port)
    for sign in (b"cluster_state:ok", b"cluster_known_nodes:3"):
        wait_for_sign(clients, sign)
    for client in clients:
        client.close()
    return servers


def wait_for_sign(clients, sign):
    """Return once each server of a cluster reports `sign`."""
    until(lambda: all(sign in client.execute_command("CLUSTER", "INFO") for client in clients), sign.decode())


def hand_over(cluster, clients):
    """Give the slots of the third server, which is emptied, to another one."""
    clients[2].flushall()
    if isinstance(cluster[2], LocalValkey):
        cluster[1].slots, cluster[2].slots = range(5462, NUM_SLOTS), range(0)
        return
    ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
    for slot in range(2 * 5462, 16384):
        for client in clients:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[0])
    # A claim of an older epoch that is still on its way could take slots back.
    clients[0].execute_command("CLUSTER", "BUMPEPOCH")

    def owners(slot):
        found = [client.execute_command("CLUSTER", "SLOTS") for client in clients]
        return {owner[2].decode() for ranges in found for first, last, owner, *_ in ranges if first <= slot <= last}

    until(lambda: owners(16383) == {ids[0]}, f"{ids[0]} as the owner of all moved slots")
    wait_for_sign(clients, b"cluster_state:ok")


def test_moved_slot_is_followed(cluster, opened):
    tier = open_tier(opened, cluster[0].url, cluster=True)
    store(tier, KEYS)
    clients = [Valkey(port=server.port) for server in cluster]
    sizes = [client.dbsize() for client in clients]
    # The blocks and the epoch.
    assert (sum(sizes), min(sizes) > 0) == (len(KEYS) + 1, True)
    # The blocks of the empty server are lost, and other servers answer for them.
    hand_over(cluster, clients)
    result = load(tier, KEYS)
    assert (result.error, len(result.failed)) == ("", sizes[2])
    again = store(tier, result.failed, job_id=3)
    assert (again.error, sorted(again.done)) == ("", sorted(result.failed))
    assert sorted(load(tier, KEYS, job_id=4).done) == KEYS
    for _ in range(2):
        tier.reset()
        wait_for_reset(tier)
        assert (found(tier, KEYS), sorted(store(tier, KEYS, job_id=5).done)) == (0, KEYS)
    assert tier._life.maintain(60)
    # The blocks of the first private epoch are gone. The first reset left those of all engines.
    assert [client.dbsize() for client in clients][2] == 0
    assert sum(client.dbsize() for client in clients) == 2 * len(KEYS) + 1
    for client in clients:
        client.close()


def test_unconfirmed_clear_deletes_nothing(local, opened):
    tier, options = open_tier(opened, local.url), ValkeyOptions(url=local.url)
    store(tier, KEYS[:2])
    refuse = Mock(side_effect=ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        clear_server(options, "kvcache:", refuse)
    refuse.assert_called_once_with({tier.prefix.decode(): 3}, ["127.0.0.1:9"])
    assert len(local.values) == clear_server(options, "kvcache:", Mock()) == 3
    assert not local.values


def test_tls_server_needs_given_authority(make_valkey, opened, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate}"
    subprocess.run([*shlex.split(command), *subject], check=True, capture_output=True)
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate))
    tls_port = free_port()
    make_valkey("--tls-port", str(tls_port), *files, "--tls-auth-clients", "no", "--requirepass", "sesame")
    url = f"valkeys://:sesame@127.0.0.1:{tls_port}"
    tier = open_tier(opened, url, ca_file=str(certificate))
    assert sorted(store(tier, KEYS).done) == KEYS
    assert sorted(load(tier, KEYS).done) == KEYS
    stranger = open_tier(opened, url, timeout_s=1.0)
    result = store(stranger, KEYS[:2])
    assert (result.done, bool(result.error)) == ([], True)
    for text in (repr(tier), repr(stranger), str(stranger.stats()), result.error):
        assert "sesame" not in text


def test_clear_refuses_clients_and_foreign_prefixes(make_valkey, run, monkeypatch):
    url = make_valkey().url
    client = Valkey.from_url(url.replace("valkey", "redis", 1))
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    client.mset({"kvcache:a:epoch": "1", "kvcache:a:1:x": "x", "kvcache:b:1:x": "x", "other": "stays"})
    status, _, err = run("tier", "clear", url, "--yes")
    assert (status, "1 other clients are connected" in err) == (2, True), err
    status, _, err = run("tier", "clear", url, "--yes", "--prefix", "other")
    assert (status, "--prefix must begin with 'kvcache:'" in err) == (2, True), err
    status, _, err = run("tier", "clear", url, "--connected")
    assert (status, client.dbsize()) == (1, 4), err
    status, out, _ = run("tier", "clear", url, "--yes", "--connected", "--prefix", "kvcache:a")
    assert status == 0
    assert "kvcache:a: 2" in out
    assert sorted(client.keys("*")) == [b"kvcache:b:1:x", b"other"]
    client.close()


@pytest.mark.parametrize(
    ("maxmemory", "policy", "ttl_s", "doubt"),
    [
        ("64mb", "allkeys-lru", None, ""),
        ("64mb", "volatile-lru", 60.0, ""),
        ("64mb", "volatile-lru", None, "maxmemory-policy is volatile-lru: once the server is full"),
        ("64mb", "noeviction", 60.0, "maxmemory-policy is noeviction: once the server is full"),
        ("0", "allkeys-lru", None, "the server has no maxmemory"),
    ],
)
def test_check_warns_of_eviction_policy(make_valkey, maxmemory, policy, ttl_s, doubt):
    server = make_valkey("--maxmemory", maxmemory, "--maxmemory-policy", policy)
    found = ValkeyTier.doubt(ValkeyOptions(url=server.url, ttl_s=ttl_s))
    assert found.startswith(doubt) if doubt else found == ""


def test_salt_of_documentation_is_refused():
    assert ValkeyOptions.parse({"url": "valkey://h", "salt": "short"}).salt == "short"
    with pytest.raises(ValueError, match="is a placeholder: take what `openssl rand -hex 16` prints"):
        ValkeyOptions.parse({"url": "valkey://h", "salt": "0f7c...a91e"})
