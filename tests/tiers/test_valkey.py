"""The Valkey tier against real servers: sharing, faults, credentials, foreign values."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from valkey import Valkey

from kvcache import ReqContext, TieredOffloadingManager
from kvcache.testing.tier_contract import TierContract
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.valkey import PASSWORD_VARIABLE, ValkeyTier

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
BLOCK_BYTES = 4096
KEYS = [bytes([number]) * 36 for number in range(1, 65)]


class Server:
    """A Valkey or Redis server that is started, stopped and started again on one port."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._command = [str(BINARY), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < end_s, "the server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    if BINARY is None:
        pytest.skip("needs valkey-server or redis-server")
    servers: list[Server] = []

    def make(*options: str) -> Server:
        server = Server(tmp_path, *options)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


def blocks(num_blocks: int = 64) -> np.ndarray:
    return np.zeros((num_blocks, BLOCK_BYTES), np.uint8)


def wait_for(tier: ValkeyTier, job_id: int, timeout_s: float = 30.0):
    end_s = time.monotonic() + timeout_s
    while True:
        for result in tier.get_finished():
            if result.job_id == job_id:
                return result
        assert time.monotonic() < end_s, "the job never ended"
        time.sleep(0.002)


def found(tier: ValkeyTier, keys: list[bytes], timeout_s: float = 30.0) -> int:
    end_s = time.monotonic() + timeout_s
    while (answer := tier.lookup(keys)) is None:
        assert time.monotonic() < end_s, "no answer to a look-up"
        tier.get_finished()
        time.sleep(0.002)
    return answer


def store(tier: ValkeyTier, host: np.ndarray, keys: list[bytes], job_id: int = 1):
    for i, key in enumerate(keys):
        host[i] = key[0]
    assert tier.submit_store(job_id, keys, list(range(len(keys))))
    return wait_for(tier, job_id)


def load(tier: ValkeyTier, host: np.ndarray, keys: list[bytes], job_id: int = 2):
    host[:] = 0
    assert tier.submit_load(job_id, keys, list(range(len(keys))))
    result = wait_for(tier, job_id)
    for i, key in enumerate(keys):
        assert key not in result.done or (host[i] == key[0]).all(), "wrong bytes"
    assert not host[len(keys) :].any(), "a block of no job was touched"
    return result


@pytest.fixture
def opened() -> Iterator[list[ValkeyTier]]:
    tiers: list[ValkeyTier] = []
    yield tiers
    for tier in tiers:
        tier.shutdown()


def open_tier(opened: list[ValkeyTier], url: str, host: np.ndarray, **options) -> ValkeyTier:
    tier = ValkeyTier(url, host, **options)
    opened.append(tier)
    return tier


class TestContract(TierContract):
    evicts = False
    is_bounded = False
    survives_restart = True

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.url = server.url

    def open_tier(self, path: Path, host_blocks, num_blocks: int) -> ValkeyTier:
        return ValkeyTier(self.url, host_blocks, salt=str(path))


def test_second_engine_finds_what_the_first_stored(server, opened):
    host_a, host_b = blocks(), blocks()
    first = open_tier(opened, server.url, host_a, fingerprint={"model": "m"})
    second = open_tier(opened, server.url, host_b, fingerprint={"model": "m"})
    assert sorted(store(first, host_a, KEYS).done) == KEYS
    assert found(second, KEYS) == len(KEYS)
    assert sorted(load(second, host_b, KEYS).done) == KEYS


@pytest.mark.parametrize("other", [{"fingerprint": {"model": "other"}}, {"salt": "another tenant"}])
def test_other_models_and_tenants_share_nothing(server, opened, other):
    host = blocks()
    store(open_tier(opened, server.url, host, fingerprint={"model": "m"}), host, KEYS[:4])
    stranger = open_tier(opened, server.url, blocks(), **({"fingerprint": {"model": "m"}} | other))
    assert found(stranger, KEYS[:4]) == 0


@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_block_that_another_engine_stored_is_not_sent_again(server, opened, ttl_s):
    host_a, host_b = blocks(), blocks()
    first = open_tier(opened, server.url, host_a, ttl_s=ttl_s)
    second = open_tier(opened, server.url, host_b, ttl_s=ttl_s)
    store(first, host_a, KEYS[:8])
    client = Valkey(port=server.port)
    num_sets = client.info("commandstats")["cmdstat_set"]["calls"]
    # Neither stored by this engine nor refused to it; and known to be there without another question.
    result = store(second, host_b, KEYS[4:12])
    assert (sorted(result.done), result.failed, result.error) == (KEYS[8:12], [], "")
    assert client.info("commandstats")["cmdstat_set"]["calls"] == num_sets + 4
    assert second.lookup(KEYS[4:12]) == 8
    assert second.stats().stored_blocks == 4
    client.close()


def test_bytes_under_way_are_bounded(server, opened):
    host = blocks()
    tier = open_tier(opened, server.url, host, max_queued_bytes=8 * BLOCK_BYTES)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert not tier.submit_store(1, KEYS[:9], list(range(9)))
        assert tier.submit_store(2, KEYS[:6], list(range(6)))
        assert not tier.submit_store(3, KEYS[6:9], list(range(6, 9)))
        assert tier.stats().refused_blocks == 12
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert wait_for(tier, 2).failed == []
    assert tier.submit_store(4, KEYS[6:9], list(range(6, 9)))


def test_answer_of_a_byte_now_and_then_ends_within_the_timeout(server, opened):
    proxy = Proxy(server.port)
    host = blocks()
    tier = open_tier(opened, f"valkey://127.0.0.1:{proxy.port}", host, timeout_s=0.5, num_threads=1)
    store(tier, host, KEYS[:2])
    proxy.mode = "drip"
    # A byte every 0.2 s is within every limit on one read, and a block would take 13 minutes.
    result = load(tier, host, KEYS[:2])
    assert result.done == []
    assert "took more than 0.5 s" in result.error
    proxy.mode = "pass"
    proxy.close()


def test_damaged_values_are_misses_that_are_deleted(server, opened):
    host = blocks()
    tier = open_tier(opened, server.url, host)
    store(tier, host, KEYS[:8])
    client = Valkey(port=server.port)
    names = {name[-36:]: name for name in client.scan_iter(match="kvcache:*") if not name.endswith(b":epoch")}
    whole = client.get(names[KEYS[0]])
    client.set(names[KEYS[0]], whole[:-1])  # short
    client.set(names[KEYS[1]], client.get(names[KEYS[1]]) + b"x")  # long
    client.set(names[KEYS[2]], client.get(names[KEYS[3]]))  # another block's
    client.set(names[KEYS[3]], whole[:100] + b"\xff" + whole[101:])  # torn
    client.set(names[KEYS[4]], b"")
    client.delete(names[KEYS[5]])
    client.delete(names[KEYS[6]])
    client.rpush(names[KEYS[6]], "somebody's list")
    result = load(tier, host, KEYS[:8])
    assert result.error == ""
    assert result.done == KEYS[7:8]
    assert tier.stats().corrupt_blocks == 6
    assert tier.stats().missed_blocks == 1
    assert not any(client.exists(names[key]) for key in KEYS[:7])
    assert store(tier, host, KEYS[:8], job_id=3).failed == []
    assert sorted(load(tier, host, KEYS[:8], job_id=4).done) == KEYS[:8]
    client.close()


def test_reset_is_not_undone_by_a_restart(server, opened):
    host = blocks()
    tier = open_tier(opened, server.url, host)
    store(tier, host, KEYS[:4])
    tier.reset()
    end_s = time.monotonic() + 30
    while tier.stats().unavailable_reason:
        assert time.monotonic() < end_s
        tier.get_finished()
    assert found(tier, KEYS[:4]) == 0
    assert found(open_tier(opened, server.url, blocks()), KEYS[:4]) == 0
    client = Valkey(port=server.port)
    assert [name for name in client.scan_iter(match="kvcache:*") if not name.endswith(b":epoch")] == []
    client.close()


def test_full_server_refuses_blocks_and_keeps_the_rest(make_server, opened):
    server = make_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    host = np.zeros((64, 1 << 17), np.uint8)
    tier = open_tier(opened, server.url, host)
    result = store(tier, host, KEYS)
    assert result.error == ""
    assert result.done
    assert result.failed
    assert sorted(load(tier, host, result.done).done) == sorted(result.done)


def test_evictions_by_the_server_are_misses(make_server, opened):
    server = make_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    host = np.zeros((64, 1 << 17), np.uint8)
    tier = open_tier(opened, server.url, host)
    assert store(tier, host, KEYS).failed == []
    result = load(tier, host, KEYS)
    assert result.error == ""
    assert result.done
    assert result.failed


def test_wrong_password_is_a_clear_error_that_does_not_show_it(make_server):
    server = make_server("--requirepass", "sesame")
    with pytest.raises(ValueError, match="refuses the credentials") as raised:
        ValkeyTier(f"valkey://:opensesame@127.0.0.1:{server.port}", blocks())
    assert "opensesame" not in str(raised.value)


def test_password_may_come_from_the_environment(make_server, opened, monkeypatch):
    server = make_server("--requirepass", "sesame")
    monkeypatch.setenv(PASSWORD_VARIABLE, "sesame")
    host = blocks()
    tier = open_tier(opened, server.url, host)
    assert store(tier, host, KEYS[:2]).failed == []
    assert "sesame" not in repr(tier)


def test_server_that_is_down_at_the_start_is_used_once_it_runs(make_server, opened):
    server = make_server()
    server.kill()
    host = blocks()
    tier = open_tier(opened, server.url, host, timeout_s=0.5)
    assert store(tier, host, KEYS[:2]).error
    server.start()
    assert store(tier, host, KEYS[:2], job_id=3).failed == []


def test_restarted_server_is_used_again(server, opened):
    host = blocks()
    tier = open_tier(opened, server.url, host, timeout_s=1.0)
    store(tier, host, KEYS[:8])
    server.kill()
    assert load(tier, host, KEYS[:8]).done == []
    server.start()
    end_s = time.monotonic() + 30
    job_id = 10
    while store(tier, host, KEYS[8:16], job_id).failed:
        assert time.monotonic() < end_s
        job_id += 1
    assert sorted(load(tier, host, KEYS[8:16], job_id=9).done) == KEYS[8:16]


def test_stopped_server_fails_jobs_within_the_timeout(server, opened):
    host = blocks()
    tier = open_tier(opened, server.url, host, timeout_s=0.5)
    store(tier, host, KEYS[:8])
    os.kill(server.pid, signal.SIGSTOP)
    try:
        result = load(tier, host, KEYS[:8])
        assert result.done == []
        assert result.error
    finally:
        os.kill(server.pid, signal.SIGCONT)


class Proxy:
    """A TCP proxy that spoils what the server answers."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.mode = "pass"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # Wakes the thread in accept, which closing alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            # Each direction has ends of its own, and closes them.
            for source, target, is_answer in ((client, server, False), (server, client, True)):
                ends = (source.dup(), target.dup(), is_answer)
                threading.Thread(target=self._pump, args=ends, daemon=True).start()
            client.close()
            server.close()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with source, target:
            self._copy(source, target, is_answer)

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_answer and self.mode == "garbage":
                    data = os.urandom(len(data))
                elif is_answer and self.mode == "cut":
                    target.sendall(data[: len(data) // 2])
                    break
                elif is_answer and self.mode == "swallow":
                    continue
                elif is_answer and self.mode == "drip":
                    for i in range(len(data)):
                        target.sendall(data[i : i + 1])
                        time.sleep(0.2)
                    continue
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("mode", ["garbage", "cut", "swallow"])
def test_spoiled_answers_lose_jobs_and_never_bytes(server, opened, mode):
    proxy = Proxy(server.port)
    host = blocks()
    tier = open_tier(opened, f"valkey://127.0.0.1:{proxy.port}", host, timeout_s=0.5)
    store(tier, host, KEYS[:16])
    proxy.mode = mode
    for job_id in range(2, 6):
        assert load(tier, host, KEYS[:16], job_id).done == []
    proxy.mode = "pass"
    end_s = time.monotonic() + 30
    job_id = 10
    while sorted(load(tier, host, KEYS[:16], job_id).done) != KEYS[:16]:
        # Garbage may have deleted what it spoiled.
        store(tier, host, KEYS[:16], job_id + 1000)
        assert time.monotonic() < end_s
        job_id += 1
    proxy.close()


@pytest.mark.parametrize("mode", ["saturated", "stopped", "drip"])
def test_scheduler_never_waits_for_the_server(server, opened, mode):
    proxy = Proxy(server.port)
    host = blocks()
    tier = open_tier(opened, f"valkey://127.0.0.1:{proxy.port}", host, timeout_s=1.0)
    others, is_over = [], threading.Event()
    if mode == "saturated":
        value = bytes(8 << 20)

        def saturate() -> None:
            with Valkey(port=server.port) as client:
                while not is_over.is_set():
                    client.set("other", value)
                    client.get("other")

        others = [threading.Thread(target=saturate) for _ in range(2)]
    longest_s = []
    try:
        for thread in others:
            thread.start()
        if mode == "stopped":
            os.kill(server.pid, signal.SIGSTOP)
        elif mode == "drip":
            proxy.mode = "drip"
        # The least of three worst cases: what else runs here makes single calls dearer, waiting makes all of them so.
        for run in range(3):
            manager = TieredOffloadingManager(16, 64, [(tier, TierConfig(deadline_s=0.5))], deadline_s=0.5)
            longest_s.append(max(cpu_times_of_a_round(manager, run)))
    finally:
        is_over.set()
        os.kill(server.pid, signal.SIGCONT)
        proxy.mode = "pass"
        proxy.close()
        for thread in others:
            thread.join()
    assert min(longest_s) < 0.002


def cpu_times_of_a_round(manager: TieredOffloadingManager, run: int) -> list[float]:
    """Return the CPU time of each scheduler's call, and see that no request waits longer than its deadline."""
    times = []

    def timed(call: Callable, *arguments):
        start_s = time.thread_time()
        answer = call(*arguments)
        times.append(time.thread_time() - start_s)
        return answer

    for i in range(20):
        keys = [b"%02d-%02d-%02d" % (run, i, j) + bytes(28) for j in range(32)]
        context = ReqContext()
        end_s = time.monotonic() + 10
        while timed(manager.lookup, keys, context) is None and i == 0:
            timed(manager.on_schedule_end)
            time.sleep(0.002)
            # Its deadline is half a second; the rest is for a machine that is busy.
            assert time.monotonic() < end_s
        output = timed(manager.prepare_store, keys, context)
        if output is not None:
            timed(manager.complete_store, output.keys_to_store, context)
        timed(manager.on_request_finished, context)
        timed(manager.on_schedule_end)
    return times


def test_another_protocol_on_the_port_is_no_hang(opened):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    client.recv(1 << 16)
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()
    host = blocks()
    tier = open_tier(opened, f"valkey://127.0.0.1:{listener.getsockname()[1]}", host, timeout_s=0.5)
    assert store(tier, host, KEYS[:2]).done == []
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def cluster(make_server: Callable[..., Server], tmp_path: Path) -> list[Server]:
    """Three servers that hold a third of the slots each."""
    servers = []
    for number in range(3):
        options = ("--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / f"nodes-{number}.conf"))
        # The bus has a port of its own, 10,000 above by default, which may be no port.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            bus_port = probe.getsockname()[1]
        servers.append(make_server(*options, "--cluster-port", str(bus_port)))
    clients = [Valkey(port=server.port) for server in servers]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * 5462, min(16383, number * 5462 + 5461))
        bus_port = client.config_get("cluster-port")["cluster-port"]
        for other in clients:
            other.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[number].port, bus_port)
    end_s = time.monotonic() + 30
    for sign in (b"cluster_state:ok", b"cluster_known_nodes:3"):
        while not all(sign in client.execute_command("CLUSTER", "INFO") for client in clients):
            assert time.monotonic() < end_s, "the cluster did not form"
            time.sleep(0.05)
    for client in clients:
        client.close()
    return servers


def test_cluster_holds_blocks_on_all_its_servers(cluster, opened):
    host_a, host_b = blocks(), blocks()
    url = cluster[0].url
    first = open_tier(opened, url, host_a, cluster=True)
    assert sorted(store(first, host_a, KEYS).done) == KEYS
    sizes = []
    for server in cluster:
        with Valkey(port=server.port) as client:
            sizes.append(client.dbsize())
    assert sum(sizes) == len(KEYS)
    assert min(sizes) > 0
    second = open_tier(opened, cluster[1].url, host_b, cluster=True)
    assert found(second, KEYS) == len(KEYS)
    assert sorted(load(second, host_b, KEYS).done) == KEYS
    second.reset()
    end_s = time.monotonic() + 30
    while second.stats().unavailable_reason:
        assert time.monotonic() < end_s
        second.get_finished()
    assert found(second, KEYS) == 0
    assert sorted(store(second, host_b, KEYS, job_id=3).done) == KEYS


def test_slot_that_moves_to_another_server_is_followed(cluster, opened):
    host = blocks()
    tier = open_tier(opened, cluster[0].url, host, cluster=True)
    store(tier, host, KEYS)
    clients = [Valkey(port=server.port) for server in cluster]
    ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
    # An empty server hands all its slots over: what it held is lost, and what is asked of it is answered elsewhere.
    clients[2].flushall()
    for slot in range(2 * 5462, 16384):
        for client in clients:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[0])
    result = load(tier, host, KEYS)
    assert result.error == ""
    assert result.done
    assert result.failed
    assert sorted(store(tier, host, result.failed, job_id=3).done) == sorted(result.failed)
    assert sorted(load(tier, host, KEYS, job_id=4).done) == KEYS
    assert clients[2].dbsize() == 0
    for client in clients:
        client.close()


def test_tls_server_must_be_signed_by_the_given_authority(make_server, opened, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = (
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        key,
        "-out",
        certificate,
    )
    subprocess.run([*map(str, command), *subject], check=True, capture_output=True)
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        tls_port = probe.getsockname()[1]
    make_server("--tls-port", str(tls_port), *files, "--tls-auth-clients", "no", "--requirepass", "sesame")
    url = f"valkeys://:sesame@127.0.0.1:{tls_port}"
    host = blocks()
    tier = open_tier(opened, url, host, ca_file=str(certificate))
    assert sorted(store(tier, host, KEYS).done) == KEYS
    assert sorted(load(tier, host, KEYS).done) == KEYS
    stranger = open_tier(opened, url, blocks(), timeout_s=1.0)
    result = store(stranger, host, KEYS[:2])
    assert result.done == []
    assert result.error
    for text in (repr(tier), repr(stranger), str(stranger.stats()), result.error):
        assert "sesame" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a valkey tier needs 'url'"),
        ({"url": "http://127.0.0.1"}, "url must begin with one of valkey, .* got scheme 'http'"),
        ({"url": "valkey://127.0.0.1", "ttl": 5}, "unknown options of a valkey tier: ttl"),
        ({"url": "valkey://127.0.0.1", "timeout_s": 0}, "timeout_s in a valkey tier must be a number of seconds > 0"),
    ],
)
def test_bad_options_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        ValkeyTier.from_config(options, blocks(), {})
