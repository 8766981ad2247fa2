"""`kvcache top` with servers that are not kvcache's: one clear line, and an exit status."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from kvcache.cli import frames


@contextmanager
def answering(listener, answer):
    """Give every client the same answer."""

    def serve():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(1 << 16)
                client.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_server_of_another_protocol_is_named(run, answer):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    with answering(listener, answer):
        code, _, error = run("top", "--once", "--url", url)
    assert code == 1
    assert f"{url} does not answer" in error


def test_page_that_is_no_text_is_named(run):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    with answering(listener, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe"):
        code, _, error = run("top", "--once", "--url", url)
    assert code == 2
    assert f"{url} shows nothing of kvcache" in error or f"{url} is no page of metrics" in error


@pytest.mark.parametrize("target", ["ftp://127.0.0.1:1/", "http://127.0.0.1:1/metrics", "file:///etc/hostname"])
def test_top_url_follows_no_redirect(run, target):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    answer = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
    with answering(listener, answer.encode()):
        code, _, error = run("top", "--once", "--url", url)
    assert code == 1
    assert f"{url} does not answer: HTTP Error 302" in error


def test_parse_metrics_of_too_many_series_raises_before_it_parses(monkeypatch):
    monkeypatch.setattr("prometheus_client.parser.text_string_to_metric_families", None)
    page = "".join(f'kvcache_free_blocks{{engine="{number}"}} 1\n' for number in range(100_000))
    with pytest.raises(ValueError, match=r"x has \d+ bytes of kvcache's series, more than 1048576"):
        frames.parse_metrics(page, 0.0, "x")


def test_parse_metrics_skips_the_series_of_others():
    others = "".join(f'python_info{{number="{number}"}} 1\n' for number in range(100_000))
    frame = frames.parse_metrics(f"{others}kvcache_free_blocks 3\n{others}", 0.0, "x")
    assert frame.values == {("free_blocks", ()): 3.0}


@pytest.mark.parametrize(("name", "value"), [("_TIMEOUT_S", 0.5), ("_MAX_PAGE_BYTES", 1 << 16)])
def test_page_without_an_end_is_named(run, monkeypatch, name, value):
    monkeypatch.setattr(frames, name, value)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    def serve():
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                client.sendall(b"# nothing\n")
                time.sleep(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    code, _, error = run("top", "--once", "--url", url)
    listener.close()
    thread.join()
    assert code == 1
    assert f"{url} does not answer: its answer does not end" in error


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc/", "http://a b/"])
def test_url_that_is_none_is_named(run, url):
    code, _, error = run("top", "--once", "--url", url)
    assert code == 2
    assert f"--url must be a URL, got {url!r}" in error
