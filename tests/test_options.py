"""Options as users write them: sizes, counts, durations and shares have one grammar, and errors name key and value."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from kvcache.options import (
    Component,
    Configurable,
    OptionError,
    Options,
    check_int,
    choice_of,
    count_from,
    name_unknown,
    option,
    parse_count,
    parse_duration,
    parse_flag,
    parse_policy,
    parse_share,
    parse_size,
    parse_text,
    parse_threads,
    split,
)
from kvcache.registry import POLICIES, REMOVED
from kvcache.tiers.disk.tier import DiskOptions, DiskTier
from kvcache.tiers.valkey import ValkeyTier


def name_of(value: Any) -> str:
    return getattr(value, "__name__", repr(value)[:40])


NAN, INFINITE = float("nan"), float("inf")
GOOD = {
    parse_size: [
        *((7, 7), (1e9, 10**9), ("7", 7), ("5 B", 5), ("64KiB", 65536), ("64 kib", 65536), ("64GB", 64 * 10**9)),
        *(("64GiB", 64 << 30), ("64G", 64 << 30), ("2k", 2048), ("3T", 3 << 40), ("1.5TiB", 3 << 39)),
        *(("1.5 MB", 1_500_000), (" 1PiB ", 1 << 50), ("0.1KB", 100)),
    ],
    parse_count: [(1, 1), ("10000", 10_000), ("10k", 10_000), ("1.5M", 1_500_000), ("2 B", 2 * 10**9), (1e4, 10_000)],
    parse_duration: [
        *((5, 5), (0.25, 0.25), ("5s", 5), ("5", 5), ("200ms", 0.2), ("50 us", 5e-5), ("2min", 120), ("1.5h", 5400)),
    ],
    parse_share: [(0, 0), (1, 1), (0.25, 0.25), ("50%", 0.5), ("0.5", 0.5)],
}
BAD = {
    (parse_size, "bytes >= 1 or a size such as '64GiB'"): [
        *("", "GiB", "1XB", "1 0GB", "-1GB", "1e9", "infGB", "9" * 5000, None, 1.5, True, 0, "0", "0.1B", [1]),
    ],
    (parse_count, "a whole number >= 1, such as 10000 or '10k', got "): [
        *(0, -1, 1.5, "1.5", "0.0001k", "10kB", True, None, INFINITE, NAN),
    ],
    (parse_duration, "a number of seconds > 0 or a duration such as"): [
        *(0, -1, "0s", "5 parsecs", "", True, None, NAN, INFINITE, 10**400),
    ],
    (parse_share, "a number in 0..1 or a share such as '50%', got "): [-0.1, 1.1, "101%", "half", True, None, NAN],
}


@pytest.mark.parametrize(
    ("parse", "value", "expected"), [(parse, *row) for parse, rows in GOOD.items() for row in rows], ids=name_of
)
def test_numbers_parse_with_any_unit(parse: Any, value: Any, expected: float) -> None:
    found = parse("memory", value)
    assert found == (expected if parse in (parse_size, parse_count) else pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize(
    ("parse", "message", "value"), [(*key, value) for key, values in BAD.items() for value in values], ids=name_of
)
def test_invalid_number_raises_with_name(parse: Any, message: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^memory must be {re.escape(message)}.*") as caught:
        parse("memory", value)
    assert ", got " in str(caught.value)


def test_value_too_large_raises_with_name() -> None:
    with pytest.raises(ValueError, match=r"^num_threads must be at most 1024, got '2k'$"):
        parse_threads("num_threads", "2k")
    with pytest.raises(ValueError, match=r"^blocks must be at most 9007199254740992, got 1000000000000000000000$"):
        parse_count("blocks", 10**21)
    with pytest.raises(ValueError, match=r"^capacity must be bytes .*, got '2000P'$"):
        parse_size("capacity", "2000P")
    with pytest.raises(ValueError, match=r"^path must be .*, got 'a\\x00b'$"):
        parse_text("path", "a\0b")


def test_parsers_name_what_they_refuse() -> None:
    assert (parse_flag("a", True), parse_text("a", "x"), parse_policy("a", "lru")) == (True, "x", "lru")
    assert choice_of("read", "write")("mode", "read") == "read"
    for parse, value, message in (
        (parse_flag, 1, "^a must be a bool, got 1$"),
        (parse_text, "", "^a must be a str that is not empty and has no NUL, got ''$"),
        (parse_policy, "lur", "^a: unknown policy 'lur', .*did you mean 'lru'"),
        (choice_of("read", "write"), "wirte", "^a must be one of read, write, got 'wirte'; did you mean 'write'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse("a", value)


def test_checked_ints_take_no_text() -> None:
    assert count_from(0)("threshold", 0) == 0
    assert (check_int("n", 3), check_int("n", 0, 0)) == (3, 0)
    for value in ("3", True, 0):
        with pytest.raises(ValueError, match=f"^name must be .*, got {value!r}$"):
            check_int("name", value)


@dataclass(frozen=True)
class Example(Options):
    where: ClassVar[str] = "an example"

    memory: int = option(parse_size, when="always")
    deadline_s: float = option(parse_duration, 5.0, when="answers are late")
    num_threads: int = option(parse_count, 2, when="one is not enough", rare=True)


def test_options_parse_reads_declared_keys() -> None:
    given = {"memory": "1k", "deadline_s": None, "num_threads": 3}
    assert Example.parse(given) == Example(1024, 5.0, 3)
    assert Example.parse_part({**given, "another": 1}) == Example(1024, 5.0, 3)
    assert Example(1).arguments("memory") == {"deadline_s": 5.0, "num_threads": 2}


def test_options_parse_reports_every_fault() -> None:
    given = {"deadline_s": "soon", "memroy": 1, "num_threads": 0, "y": 1}
    with pytest.raises(OptionError) as caught:
        Example.parse(given)
    expected = (
        "an example needs 'memory', got ",
        "deadline_s in an example must be a number of seconds",
        "num_threads in an example must be a whole number >= 1",
        "unknown options of an example: memroy (did you mean 'memory'?), y; known ones: memory",
    )
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(start)


def test_options_constructor_parses_and_checks() -> None:
    assert Example("1k", None, "4") == Example.parse({"memory": 1024, "num_threads": 4})
    assert replace(Example("1k"), deadline_s="2s") == Example(1024, 2.0)
    assert DiskOptions(path="kv", capacity="1GiB", num_threads=2, codec=None).capacity == 1 << 30
    for arguments, message in (
        ((None,), "memory in an example is missing, got None"),
        (("1k", "soon"), "deadline_s in an example must be a number of seconds"),
        (("1k", 1, True), "num_threads in an example must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            Example(*arguments)


def test_split_parts_options_by_name() -> None:
    assert split({"a": 1, "b": 2, "c": 3}, ["a", "c", "d"]) == ({"a": 1, "c": 3}, {"b": 2})


def test_markdown_lists_options_and_reasons() -> None:
    assert Example.as_markdown().splitlines()[2:] == [
        "| `memory` | size | required |  | always |",
        "| `deadline_s` | duration | `5.0` |  | answers are late |",
        "| `num_threads` | count | `2` | yes | one is not enough |",
    ]


def test_removed_names_state_their_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "lrv", "use 'lru' instead")
    assert name_unknown({"lrv": 1}, {"lru"}) == "lrv (use 'lru' instead)"
    with pytest.raises(ValueError, match=r"unknown policy 'lrv'.*; it was removed: use 'lru' instead"):
        POLICIES.resolve("lrv")


def test_unknown_keys_name_similar_ones() -> None:
    assert name_unknown({"cache_polcy": 1, "zzz": 2, "tiers": []}, {"cache_policy", "tiers"}) == (
        "cache_polcy (did you mean 'cache_policy'?), zzz"
    )
    assert name_unknown({"tiers": []}, {"tiers"}) == ""


class Plain(Configurable):
    def __init__(self, *context: Any, **options: Any) -> None:
        self.arguments = context, options

    @classmethod
    def unavailable_reason(cls, options: Any) -> str:
        return f"not with {options!r}"


class Parsed(Plain):
    options_type = Example


def test_component_makes_instances_of_parsed_options() -> None:
    example = {"memory": 1024, "deadline_s": 5.0, "num_threads": 2}
    for component, given, expected in ((Plain, {}, {}), (Parsed, {"memory": "1KiB"}, example)):
        assert Component.parse(component, given).make(7).arguments == ((7,), expected)
        assert component.from_config(given, 7).arguments == ((7,), expected)
    with pytest.raises(ValueError, match="unknown options of an example: memroy"):
        Component.parse(Parsed, {"memory": 1, "memroy": 2})
    with pytest.raises(ValueError, match="unknown options of Plain: colour; known ones: none"):
        Component.parse(Plain, {"colour": "red"})


def test_options_without_place_name_their_class() -> None:
    with pytest.raises(ValueError, match="unknown options of Options: path; known ones: none"):
        Options.parse({"path": "kv"})


def test_component_asks_its_class_for_reasons() -> None:
    assert Component.parse(Parsed, {"memory": "1k"}).unavailable_reason() == f"not with {Example(1024)!r}"


def test_component_description_hides_secrets() -> None:
    codec = {"type": "kvcache.tiers.codecs.zstd:ZstdCodec", "level": 3}
    pytest.importorskip("zstandard")
    given = {"path": "kv", "capacity": "1k", "read_only": False, "codec": codec}
    assert Component.parse(DiskTier, given).describe() == {
        "type": "DiskTier",
        "path": "kv",
        "capacity": 1024,
        "codec": {"type": "ZstdCodec", "level": 3},
    }
    parsed = Component.parse(ValkeyTier, {"url": "valkey://u:p@h", "password": "x"})
    assert parsed.describe() == {"type": "ValkeyTier", "url": "valkey://***@h", "password": "***"}
