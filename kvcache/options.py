"""Options as users write them: one grammar of sizes, counts, durations and shares, and one base class of tables.

``extra_config``, an engine's mapping, an entry of ``tiers`` and the command line are all parsed with these functions,
so a value means the same everywhere. Parsing has no side effects: the caller decides what to log.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Self, TypeGuard

from kvcache.registry import POLICIES, REMOVED, did_you_mean

Parser = Callable[[str, Any], Any]
"""Parse one option: takes its name and value. Raise ValueError naming both if the value is invalid."""


def hide_keys(text: str) -> str:
    """Return an error's text without possible keys (hexadecimal or base64) that were written to a wrong place."""
    return re.sub(r"[0-9a-fA-F]{32,}|[\w+/-]{43}=", "***", text)


class OptionError(ValueError):
    """One or more invalid options; `problems` has one message each."""

    def __init__(self, *problems: str) -> None:
        self.problems = [hide_keys(problem) for problem in problems]
        super().__init__("; ".join(self.problems))


def run_all(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return the result of every call; raise one OptionError with the messages of all that raise ValueError."""
    results: list[Any] = []
    problems: list[str] = []
    for call in calls:
        try:
            results.append(call())
        except ValueError as error:
            problems += error.problems if isinstance(error, OptionError) else [str(error)]
    if problems:
        raise OptionError(*problems)
    return results


# A bare letter is binary, as `free`, `ls` and `truncate` read it.
_SIZE_UNITS: dict[str, int | Fraction] = {"": 1, "b": 1}
_SIZE_UNITS |= {f"{letter}{tail}": 1 << 10 * power for power, letter in enumerate("kmgtp", 1) for tail in ("", "ib")}
_SIZE_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_COUNT_UNITS: dict[str, int | Fraction] = {"": 1, "k": 1000, "m": 1000**2, "b": 1000**3}
_DURATION_UNITS: dict[str, int | Fraction] = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_DURATION_UNITS |= {"us": Fraction(1, 10**6), "ms": Fraction(1, 1000)}
MOST_KEY_GROUPS = 64
_MOST_COUNT = 1 << 53
_MOST_BYTES = 1 << 60
_MOST_THREADS = 1024
_CENTURY_S = 100 * 365 * 86_400
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z%]*)", re.IGNORECASE)


def parse_size(name: str, value: object) -> int:
    """Return the bytes that `value` names; ValueError if it names none, less than one, or more than 1 EiB.

    A value is whole bytes (JSON may write them as ``1e9``) or a number with a unit: ``"64GB"`` is decimal, ``"64GiB"``
    and ``"64G"`` are binary. Fractions of a byte are cut off.
    """
    num_bytes = _whole_number(value)
    if isinstance(value, str) and (parsed := _number_and_unit(value, _SIZE_UNITS)) is not None:
        num_bytes = int(parsed)
    if num_bytes is None or not 1 <= num_bytes <= _MOST_BYTES:
        raise ValueError(f"{name} must be bytes >= 1 or a size such as '64GiB', '64GB' or '1.5TiB', got {value!r}")
    return num_bytes


def read_small_file(path: str, max_bytes: int = 1 << 20) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`; OSError for a device, a FIFO or a longer file."""
    # Opening a FIFO would wait for its writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes")
    return content


def format_size(num_bytes: float) -> str:
    """Return a size with four digits at most, in the largest binary unit that leaves at least one.

    >>> format_size(3 << 19)
    '1.5 MiB'
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(num_bytes) >= 1024 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    return f"{num_bytes:.4g} {units[0]}"


def parse_count(name: str, value: object, least: int = 1, most: int = _MOST_COUNT) -> int:
    """Return the whole number that `value` names: an int, ``10000.0``, ``"10000"``, ``"10k"``, ``"1.5M"`` or ``"2B"``.

    Raise ValueError if it names none, or one below `least` or above `most`.
    """
    count = _whole_number(value)
    if isinstance(value, str) and (parsed := _number_and_unit(value, _COUNT_UNITS)) is not None:
        count = int(parsed) if parsed.denominator == 1 else None
    if count is None or count < least:
        raise ValueError(f"{name} must be a whole number >= {least}, such as 10000 or '10k', got {value!r}")
    if count > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")
    return count


def parse_duration(name: str, value: object) -> float:
    """Return the seconds that `value` names: a number, or one with a unit of us, ms, s, min, h or d: ``"200ms"``.

    Raise ValueError if it names none, or if they are not positive, or more than a century.
    """
    seconds = _number_of(value, _DURATION_UNITS)
    if seconds is None or not 0 < seconds <= _CENTURY_S:
        raise ValueError(f"{name} must be a number of seconds > 0 or a duration such as '5s' or '200ms', got {value!r}")
    return seconds


def parse_share(name: str, value: object) -> float:
    """Return the share that `value` names: a number in 0..1 or a percentage such as ``"50%"``; ValueError otherwise."""
    share = _number_of(value, {"": Fraction(1), "%": Fraction(1, 100)})
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"{name} must be a number in 0..1 or a share such as '50%', got {value!r}")
    return share


def parse_flag(name: str, value: object) -> bool:
    """Return `value` if it is a bool; ValueError otherwise."""
    if type(value) is not bool:
        raise ValueError(f"{name} must be a bool, got {value!r}")
    return value


def parse_text(name: str, value: object) -> str:
    """Return `value` if it is a str that is not empty and has no NUL; ValueError otherwise."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{name} must be a str that is not empty and has no NUL, got {value!r}")
    return value


LEAST_SALT = 16
"""Characters of a salt that cannot be guessed: `openssl rand -hex 16` prints twice as many."""


def parse_salt(name: str, value: object) -> str:
    """Return a secret; ValueError if it is empty, not a string, or the example of the documentation."""
    salt = parse_text(name, value)
    if "..." in salt:
        raise ValueError(f"{name} is a placeholder: take what `openssl rand -hex 16` prints")
    return salt


def parse_policy(name: str, value: Any) -> str | type:
    """Return `value` if it names a policy, as `kvcache.registry.POLICIES` resolves it; ValueError otherwise."""
    try:
        POLICIES.resolve(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    chosen: str | type = value
    return chosen


def choice_of(*choices: str) -> Parser:
    """Return the parser of an option that must be one of `choices`."""

    def parse_choice(name: str, value: object) -> Any:
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")
        return value

    parse_choice.__name__ = ", ".join(f"`{choice}`" for choice in choices)
    return parse_choice


def count_from(least: int, most: int = _MOST_COUNT) -> Parser:
    """Return the parser of a whole number in `least`..`most`."""

    def parse(name: str, value: object) -> int:
        return parse_count(name, value, least, most)

    parse.__name__ = "parse_count"
    return parse


parse_threads = count_from(1, _MOST_THREADS)
"""Parses a number of threads."""


def option(parse: Parser, default: Any = MISSING, *, when: str, rare: bool = False) -> Any:
    """Declare an option as a field of an `Options` class; without a default it is required.

    `when` ends the sentence "set it when ..." in the documentation, which marks `rare` options as rarely needed.
    """
    return field(default=default, metadata={"parse": parse, "when": when, "rare": rare})


@dataclass(frozen=True)
class Options:
    """Base of a component's options: a dataclass whose fields are declared with `option`.

    Making one parses and checks its values, so an object is valid. The parser, the check of unknown
    keys and the table in the documentation are generated from the fields.
    """

    where: ClassVar[str] = ""
    """What errors call the mapping that a user wrote: ``"a disk tier"``; empty: the name of the class."""

    def __post_init__(self) -> None:
        place = f" in {self.where}" if self.where else ""
        for name, declared in self.declared().items():
            object.__setattr__(self, name, _parsed(declared, getattr(self, name), place))
        self.check_together(self.where)

    @classmethod
    def declared(cls) -> dict[str, Field[Any]]:
        """Return the fields that are options, by name."""
        return {field.name: field for field in fields(cls) if "parse" in field.metadata}

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str = "") -> Self:
        """Parse the options as a user wrote them; None counts as left out.

        OptionError names each option that is missing, invalid or unknown. `where` is the name of `given` in errors, in
        place of the class's own.
        """
        where = where or cls.where or cls.__name__
        declared = cls.declared()

        def value_of(name: str, field: Field[Any]) -> Any:
            if given.get(name) is None and field.default is MISSING:
                raise ValueError(f"{where} needs {name!r}, got {without_secrets(given)!r}")
            return _parsed(field, given.get(name), f" in {where}")

        def refuse_unknown() -> None:
            if unknown := name_unknown(given, declared):
                raise ValueError(f"unknown options of {where}: {unknown}; known ones: {', '.join(declared) or 'none'}")

        values = run_all([*(partial(value_of, *item) for item in declared.items()), refuse_unknown])
        # The constructor would parse again, and name another place in errors.
        options = object.__new__(cls)
        for name, value in zip(declared, values, strict=False):
            object.__setattr__(options, name, value)
        options.check_together(where)
        return options

    @classmethod
    def parse_part(cls, given: Mapping[str, Any], where: str = "") -> Self:
        """Parse the options of this class in the mapping of an engine, which may hold keys of other components.

        Removed options are refused, because no other component reads them.
        """
        return cls.parse(split(given, cls.declared().keys() | REMOVED.keys())[0], where)

    def check_together(self, where: str) -> None:
        """Raise ValueError if options do not fit each other; called once all of them are valid."""

    def arguments(self, *left_out: str) -> dict[str, Any]:
        """Return the options by name, without those in `left_out`."""
        return {name: getattr(self, name) for name in self.declared() if name not in left_out}

    def describe(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, without secrets."""
        defaults = {name: field.default for name, field in self.declared().items()}
        shown: dict[str, Any] = without_secrets(
            {name: value for name, value in self.arguments().items() if value != defaults.get(name, MISSING)}
        )
        return {name: value.describe() if isinstance(value, Component) else value for name, value in shown.items()}

    @classmethod
    def as_markdown(cls) -> str:
        """Return a table of the options: name, kind of value, default, whether few need it, and when to set it."""
        lines = ["| option | value | default | rarely needed | set it when |", "|---|---|---|---|---|"]
        for name, declared in cls.declared().items():
            kind = declared.metadata["parse"].__name__
            for prefix in ("_", "parse_", "check_"):
                kind = kind.removeprefix(prefix)
            if not kind.startswith("`"):
                kind = kind.replace("_", " ")
            default = "required" if declared.default is MISSING else f"`{json.dumps(declared.default)}`"
            default = "" if declared.default is None else default
            rare, when = "yes" if declared.metadata["rare"] else "", declared.metadata["when"]
            lines.append(f"| `{name}` | {kind} | {default} | {rare} | {when} |")
        return "\n".join(lines) + "\n"


class Configurable:
    """Base of the classes that a configuration names by ``type``: tiers, codecs and exporters.

    Attributes
    ----------
    options_type : type of Options
        Of the class: the options that users write beside ``type``. Default: it has none.
    """

    options_type: ClassVar[type[Options]] = Options

    @classmethod
    def unavailable_reason(cls, options: Any) -> str:
        """Return why an instance with `options` cannot be opened now, or "". May wait; opens nothing."""
        return ""

    @classmethod
    def doubt(cls, options: Any) -> str:
        """Return a warning about an instance with `options` that opens now but may fail later, or ""; may wait."""
        return ""

    @classmethod
    def make(cls, options: Any, *context: Any) -> Self:
        """Make an instance of its parsed options and its context.

        Parameters
        ----------
        options : Options
            An object of `options_type`. The constructor of a tier gets it, those of others its `arguments`.
        *context
            For a tier, `host_blocks` (the pool, uint8 or int8, shape (num_blocks, block_bytes)) and `fingerprint` (a
            mapping that identifies the model and the geometry of the blocks). For a codec, the bytes of a block; 0: not
            known yet, only the options are checked. For an exporter, the `Telemetry` to report.

        Returns
        -------
        Configurable
            The instance, opened. The caller closes it.

        Raises
        ------
        ValueError
            An option does not fit the context.
        OSError
            An exporter's address is in use, or cannot be opened.
        """
        return cls(*context, **options.arguments())

    @classmethod
    def from_config(cls, options: Mapping[str, Any], *context: Any) -> Self:
        """Make an instance of the options as a user wrote them, without ``type`` and what the manager itself reads.

        Raises
        ------
        ValueError
            An option is missing, unknown or invalid, or does not fit the context.
        """
        made: Self = Component.parse(cls, options).make(*context)
        return made


@dataclass(frozen=True, slots=True)
class Component:
    """A component that a configuration names: its class and its parsed options."""

    cls: Any
    options: Options

    @classmethod
    def parse(cls, component: type[Configurable], given: Mapping[str, Any]) -> Component:
        """Parse the options of a component, `given` without its ``type``."""
        table = component.options_type
        return cls(component, table.parse(given, table.where or component.__name__))

    def make(self, *context: Any) -> Any:
        """Make the component; see `Configurable.make`."""
        return self.cls.make(self.options, *context)

    def unavailable_reason(self) -> str:
        """Return why the component cannot be opened now, or ""."""
        reason: str = self.cls.unavailable_reason(self.options)
        return reason

    def doubt(self) -> str:
        """Return a warning about a later failure, or ""."""
        doubt: str = self.cls.doubt(self.options)
        return doubt

    def describe(self) -> dict[str, Any]:
        """Return the class and the options that differ from their defaults, without secrets."""
        return {"type": self.cls.__name__, **self.options.describe()}


def split(given: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `given` with these names, and the others.

    >>> split({"path": "kv", "pause_s": 2}, ["pause_s"])
    ({'pause_s': 2}, {'path': 'kv'})
    """
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, value in given.items():
        parts[name not in names][name] = value
    return parts


def _parsed(field: Field[Any], value: Any, place: str) -> Any:
    default = field.default
    # A default need not be what its parser accepts, as "" of a text.
    if value is None or (value == default and type(value) is type(default)):
        if default is MISSING:
            raise ValueError(f"{field.name}{place} is missing, got None")
        return default
    return field.metadata["parse"](f"{field.name}{place}", value)


def name_unknown(given: Iterable[str], known: Collection[str]) -> str:
    """Return the keys of `given` that are not `known`, each with its replacement or a similar known key, or "".

    >>> name_unknown({"cache_polcy": "arc", "zzz": 1}, ["cache_policy", "tiers"])
    "cache_polcy (did you mean 'cache_policy'?), zzz"
    """
    named = []
    for name in sorted(str(name) for name in given if name not in known):
        close = difflib.get_close_matches(name, sorted(known), n=1)
        hint = REMOVED.get(name) or (f"did you mean {close[0]!r}?" if close else "")
        named.append(f"{name} ({hint})" if hint else name)
    return ", ".join(named)


_SECRET = re.compile(r"password|passwd|secret|salt|token|credential|api_?key", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=//)[^/@\s]*@")


def without_secrets(given: Any) -> Any:
    """Return options as they may be logged: values of secrets, and users in URLs, are replaced by ``***``.

    >>> without_secrets({"url": "valkey://user:pw@host:6379", "password": "pw", "db": 1})
    {'url': 'valkey://***@host:6379', 'password': '***', 'db': 1}
    """
    if isinstance(given, Mapping):
        return {
            name: "***" if isinstance(name, str) and _SECRET.search(name) else without_secrets(value)
            for name, value in given.items()
        }
    if isinstance(given, list | tuple):
        return [without_secrets(value) for value in given]
    if isinstance(given, str):
        return _USER_IN_URL.sub("***@", given)
    return given


def check_int(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is an int (not a bool, not text) from `least` to `most`; raise ValueError otherwise."""
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be an int {limits}, got {value!r}")
    return value


def check_windows(group_windows: object) -> list[int | None]:
    """Return the windows of KV-cache groups as a list of ints >= 1, and None for groups without a window."""
    if isinstance(group_windows, str | bytes) or not isinstance(group_windows, Sequence):
        raise ValueError(f"group_windows must be a list such as [null, 1], got {group_windows!r}")
    for window in group_windows:
        if window is not None:
            check_int("a window of group_windows", window)
    if None not in group_windows:
        raise ValueError(f"a group of group_windows must have no window (null), got {group_windows!r}")
    if len(group_windows) > MOST_KEY_GROUPS:
        raise ValueError(f"group_windows must name at most {MOST_KEY_GROUPS} groups, got {len(group_windows)}")
    return list(group_windows)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole_number(value: object) -> int | None:
    if isinstance(value, float):
        # JSON may write a whole number as 1e9.
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number_of(value: object, units: Mapping[str, int | Fraction]) -> float | None:
    if isinstance(value, str):
        parsed = _number_and_unit(value, units)
        return None if parsed is None else float(parsed)
    return value if _is_number(value) else None


def _number_and_unit(text: str, units: Mapping[str, int | Fraction]) -> Fraction | None:
    match = _NUMBER.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    return None if match is None or unit is None else Fraction(match[1]) * unit
