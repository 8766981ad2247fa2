"""`kvcache status` and `kvcache top` with sockets that do not belong to an engine: one line that names the path."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvcache.exporters import status as status_module

Run = Callable[..., tuple[int, str, str]]
COMMANDS = (("status",), ("top", "--once", "--interval", "0.1"))


@contextmanager
def engine_answering(path: Path, answers: dict[str, bytes]) -> Iterator[None]:
    """Give every client the answer to its command."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    command = json.loads(client.recv(1 << 16) or b"{}").get("command")
                    with suppress(OSError):
                        client.sendall(answers.get(command, b""))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def result(value: Any) -> bytes:
    return json.dumps({"ok": True, "result": value}).encode() + b"\n"


def file(path: Path) -> None:
    path.write_text("data")


def bound(kind: int, backlog: int | None = None) -> Callable[[Path], socket.socket]:
    def bind(path: Path) -> socket.socket:
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
def test_path_that_nobody_answers_at_is_named(
    run: Run, tmp_path: Path, command: tuple[str, ...], make: Callable[[Path], Any], status: int, error: str
) -> None:
    path = tmp_path / "s"
    made = make(path)
    try:
        code, out, text = run(*command, "--socket", path)
    finally:
        if made is not None:
            made.close()
    assert (code, out) == (status, "")
    assert str(path) in text
    assert error in text


def test_path_that_is_too_long_for_a_socket_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.chdir(folder)
    bound(socket.SOCK_STREAM)(Path("s")).close()
    code, _, text = run("status", "--socket", folder / "s")
    assert code == 1
    assert f"{folder}/s: AF_UNIX path too long" in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one[0])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"\xff\xfe",
        b"[]\n",
        b'{"ok": true',
        b'{"ok": false}\n',
        b"[" * 5000,
        b"x" * 70_000,
    ],
    ids=range(8),
)
def test_answer_that_is_none_names_the_path(
    run: Run, tmp_path: Path, command: tuple[str, ...], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "MAX_ANSWER_BYTES", 65_536)
    path = tmp_path / "s"
    with engine_answering(path, {"status": answer, "samples": answer}):
        code, out, text = run(*command, "--socket", path)
    assert (code, out) == (2, "")
    assert f"{path} gave no answer of a kvcache engine" in text


@pytest.mark.parametrize("arguments", [(), ("--json",)])
@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        [],
        {},
        {"labels": {}, "parts": None},
        {"labels": [], "parts": []},
        {"labels": {}, "parts": [{"name": "manager", "labels": {}}]},
        {"labels": {}, "parts": [{"name": "manager", "labels": {}, "stats": 7}]},
        {"labels": {}, "parts": [{"name": "manager", "labels": {}, "stats": {"a": {"bounds": [1], "counts": "x"}}}]},
    ],
    ids=range(9),
)
def test_status_of_another_shape_names_the_path(
    run: Run, tmp_path: Path, value: object, arguments: tuple[str, ...]
) -> None:
    path = tmp_path / "s"
    with engine_answering(path, {"status": result(value)}):
        code, out, text = run("status", "--socket", path, *arguments)
    assert (code, out) == (2, "")
    assert f"{path} gave no status of a kvcache engine" in text


@pytest.mark.parametrize(
    "samples",
    [
        {"time_s": 1, "labels": {}, "samples": [["a", "counter", {}, 10**400]]},
        {"time_s": float("nan"), "labels": {}, "samples": []},
        {"time_s": 10**400, "labels": {}, "samples": []},
        {"time_s": 1, "labels": {}, "samples": [["a", "counter", []]]},
    ],
    ids=range(4),
)
def test_samples_that_are_no_numbers_name_the_path(run: Run, tmp_path: Path, samples: object) -> None:
    path = tmp_path / "s"
    with engine_answering(path, {"samples": result(samples)}):
        code, out, text = run("top", "--once", "--interval", "0.1", "--socket", path)
    assert (code, out) == (2, "")
    assert f"{path} gave no samples of a kvcache engine" in text


@pytest.mark.parametrize(
    "what_if",
    [
        None,
        {"uses": 1},
        {"uses": 1, "policy": "lru", "num_blocks": 1, "capacities": "x", "hit_ratios": {}},
        {"uses": 1, "policy": "lru", "num_blocks": 1, "capacities": [1], "hit_ratios": {"lru": ["x"]}},
        {"uses": 1, "policy": "lru", "num_blocks": 1, "capacities": [1], "hit_ratios": {"lru": [0.5, 0.6]}},
    ],
    ids=range(5),
)
def test_what_if_of_another_shape_is_left_out(run: Run, tmp_path: Path, what_if: object) -> None:
    path = tmp_path / "s"
    samples = result({"time_s": 1, "labels": {}, "samples": [["tier_held_blocks", "gauge", {"medium": "[/red]"}, 1]]})
    with engine_answering(path, {"samples": samples, "what_if": result(what_if)}):
        code, out, _ = run("top", "--once", "--interval", "0.1", "--socket", path)
    assert code == 0
    assert "What if" not in out
    assert "[/red]" in out


def test_nothing_that_an_engine_says_steers_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    evil = "\x1b[2J\ud800[/red]"
    part = {"name": evil, "labels": {evil: evil}, "stats": {evil: evil}}
    refused = json.dumps({"ok": False, "error": evil}).encode()
    samples = result({"time_s": 1, "labels": {evil: evil}, "samples": [["tier_held_blocks", "", {"medium": evil}, 1]]})
    status = {"labels": {evil: evil}, "parts": [part], "block_size": evil, "block_bytes": 0, "uptime_s": 1.0}
    answers = {"status": result(status), "samples": samples, "what_if": refused}
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
