"""`kvcache status` and `kvcache top` with sockets of others: one clear line, and an exit status."""

import json
import os
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvcache.exporters import status as status_module

COMMANDS = (("status",), ("top", "--once", "--interval", "0.1"))
TOP = COMMANDS[1]


@contextmanager
def answering(listener, answer):
    """Send every client of `listener` the parts that `answer` returns for its request."""

    def serve():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, suppress(OSError):
                for part in answer(client.recv(1 << 16)):
                    client.sendall(part)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def engine_answering(path, answers):
    """Give every client of a socket the answer to its command."""
    listener = bound(socket.SOCK_STREAM, 128)(path)
    return answering(listener, lambda request: [answers.get(json.loads(request or b"{}").get("command"), b"")])


def result(value):
    return json.dumps({"ok": True, "result": value}).encode() + b"\n"


def file(path):
    path.write_text("data")


def bound(kind, backlog=None):
    def bind(path):
        one = socket.socket(socket.AF_UNIX, kind)
        one.bind(str(path))
        if backlog is not None:
            one.listen(backlog)
        return one

    return bind


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one[0])
@pytest.mark.parametrize(
    ("make", "status", "error"),
    [
        (Path.mkdir, 2, "is no socket"),
        (file, 2, "is no socket"),
        (os.mkfifo, 2, "is no socket"),
        (lambda path: path.symlink_to("/dev/null"), 2, "is no socket"),
        (lambda path: None, 1, "No such file"),
        (bound(socket.SOCK_STREAM), 1, "Connection refused"),
        (bound(socket.SOCK_DGRAM), 1, "Protocol wrong type"),
        (bound(socket.SOCK_SEQPACKET, 1), 1, "Protocol wrong type"),
    ],
)
def test_silent_path_is_named(run, sockets, command, make, status, error):
    path = sockets / "s"
    made = make(path)
    try:
        code, out, text = run(*command, "--socket", path)
    finally:
        if made is not None:
            made.close()
    assert (code, out) == (status, "")
    assert str(path) in text
    assert error in text


def test_overlong_socket_path_is_named(run, tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.chdir(folder)
    bound(socket.SOCK_STREAM)(Path("s")).close()
    code, _, text = run("status", "--socket", folder / "s")
    assert code == 1
    assert f"{folder}/s: AF_UNIX path too long" in text


NO_ANSWERS = [b"", b"SSH-2.0-OpenSSH\r\n", b"\xff\xfe", b"[]\n", b'{"ok": true', b'{"ok": false}\n', b"[" * 5000]
NO_ANSWERS += [b"x" * 70_000]
NO_STATUS = [
    *(None, 5, [], {}, {"labels": {}, "parts": None}, {"labels": [], "parts": []}),
    {"labels": {}, "parts": [{"name": "manager", "labels": {}}]},
    {"labels": {}, "parts": [{"name": "manager", "labels": {}, "stats": 7}]},
    {"labels": {}, "parts": [{"name": "manager", "labels": {}, "stats": {"a": {"bounds": [1], "counts": "x"}}}]},
]
NO_SAMPLES = [
    {"time_s": 1, "labels": {}, "samples": [["a", "counter", {}, 10**400]]},
    {"time_s": float("nan"), "labels": {}, "samples": []},
    {"time_s": 10**400, "labels": {}, "samples": []},
    {"time_s": 1, "labels": {}, "samples": [["a", "counter", []]]},
]
FOREIGN = [
    *((command, answer, "answer") for command in COMMANDS for answer in NO_ANSWERS),
    *((("status", *more), result(value), "status") for more in ((), ("--json",)) for value in NO_STATUS),
    *((TOP, result(samples), "samples") for samples in NO_SAMPLES),
]


@pytest.mark.parametrize(("command", "answer", "lacking"), FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_answer_names_the_path(run, sockets, command, answer, lacking, monkeypatch):
    monkeypatch.setattr(status_module, "MAX_ANSWER_BYTES", 65_536)
    path = sockets / "s"
    with engine_answering(path, {"status": answer, "samples": answer}):
        code, out, text = run(*command, "--socket", path)
    assert (code, out) == (2, "")
    assert f"{path} gave no {lacking} of a kvcache engine" in text


def test_engine_text_never_steers_the_terminal(run, sockets):
    path = sockets / "s"
    evil = "\x1b[2J\ud800[/red]"
    part = {"name": evil, "labels": {evil: evil}, "stats": {evil: evil}}
    refused = json.dumps({"ok": False, "error": evil}).encode()
    samples = result({"time_s": 1, "labels": {evil: evil}, "samples": [["tier_held_blocks", "", {"medium": evil}, 1]]})
    status = {"labels": {evil: evil}, "parts": [part], "block_size": evil, "block_bytes": 0, "uptime_s": 1.0}
    answers = {"status": result(status), "samples": samples}
    with engine_answering(path, answers):
        for command in COMMANDS:
            code, out, _ = run(*command, "--socket", path)
            assert code == 0
            assert "\x1b[2J" not in out
            assert r"\x1b[2J\ud800[/red]" in out
        answers["status"] = refused
        code, _, text = run("status", "--socket", path)
    assert code == 2
    assert rf"{path}: status: \x1b[2J\ud800[/red]" in text
