"""Read the fields of records: names, times, and the requests that a record wraps.

Logs write one fact in many ways (`startTime`, `start_time`, an attribute of a span, a request in a proxy's record), so
the readers of all formats use this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from typing import Any

from kvcache.lab.traces.requests import TIME_UNITS, BadRecord

EMPTY: tuple[Any, ...] = (None, "", "{}", "[]", [], {})
BODIES = (
    *("messages", "conversations", "conversation", "contents", "input", "inputs", "prompt", "prompts", "text"),
    *("text_input", "input_text", "message"),
)
"""Fields that hold a prompt, or the last part of one."""
TOKENS = ("prompt_token_ids", "token_ids", "input_ids")
"""Fields that hold a whole prompt as an engine has rendered it."""
_TIMES = dict.fromkeys(
    (
        *("timestamp", "start_time", "starttime", "request_start_time", "arrived_at", "arrival_time", "received_at"),
        *("requested_at", "request_created_at", "@timestamp", "time", "ts", "tstamp", "created", "created_at"),
        *("clock_time", "time_iso8601", "time_local", "msec"),
    )
)
TIMES: dict[str, str | None] = _TIMES | {f"{name}_{unit}": unit for name in _TIMES for unit in ("ms", "us", "ns")}
TIMES |= {"start_time_unix_nano": "ns", "time_unix_nano": "ns"}
_MAX_TIME = 1e20
_SHOWN_CHARS = 60
# Dotted attributes of spans, and the names of the same facts in a request.
_ATTRIBUTES = {
    "gen_ai.input.messages": "messages",
    "gen_ai.prompt": "messages",
    "llm.input_messages": "messages",
    "llm.prompts": "prompts",
    "gen_ai.system_instructions": "system",
    "gen_ai.tool.definitions": "tools",
    "llm.tools": "tools",
    "llm.request.functions": "tools",
    "llm.invocation_parameters": "invocation_parameters",
    "gen_ai.request.model": "model",
    "llm.model_name": "model",
    "gen_ai.operation.name": "operation_name",
    "llm.request.type": "operation_name",
    "openinference.span.kind": "span_kind",
    "traceloop.span.kind": "span_kind",
    "gen_ai.usage.output_tokens": "output_tokens",
    "llm.token_count.completion": "output_tokens",
}
_ROOTS = ("gen_ai", "llm", "openinference", "traceloop")
_GROUPS = ("resource_spans", "scope_spans", "spans", "observations")
_WRAPPERS = (
    *("request", "body", "params", "request_body", "proxy_server_request", "payload", "kwargs", "full_request"),
    *("raw_request", "json_payload", "_source", "input_body_json", "input", "inputs", "prompt", "messages", "message"),
    *("log", "attributes", "invocation_parameters"),
)
_KINDS = ("type", "span_kind", "run_type", "span_type", "observation_type", "operation_name")
_NO_GENERATIONS = {
    *("span", "event", "agent", "tool", "chain", "retriever", "embedding", "embeddings", "evaluator", "guardrail"),
    *("reranker", "workflow", "task", "execute_tool", "invoke_agent", "create_agent", "parser", "trace"),
}
_ROUTES = ("call_type", "url", "endpoint", "path", "route", "uri", "request_uri", "operation")
_NO_PROMPTS = re.compile(r"(^a?|[/:])(embed|rerank|moderation|image|speech|audio|transcri)")
_FAILED = ("failure", "failed", "error")
_CACHED = ("cache_hit", "cached", "is_cached", "from_cache", "response_cached", "cache_status")


@lru_cache(1 << 14)
def plain_name(name: str) -> str:
    """Return a field's or column's name in lower case, with underscores between words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])| ", "_", name.strip().strip("\ufeff\"'")).lower()


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with plain names."""
    return {plain_name(name): value for name, value in record.items() if name is not None}


def parsed(value: Any) -> Any:
    """Parse a JSON text of a list or an object, as exports have it; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def shown(value: object) -> str:
    """Return a value as an error shows it, cut to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return repr(text) if isinstance(value, str) else text


class Clock:
    """Reads the times of records: numbers in a unit, or ISO 8601, in `zone` if they have no offset.

    `name` is the field that the last time was read from.
    """

    def __init__(self, unit: str | None, zone: tzinfo = UTC) -> None:
        self.name = "timestamp"
        self._unit = unit
        self._zone = zone

    def time_of(self, named: Mapping[str, Any], unit: str) -> float | None:
        """Return the arrival of a record in seconds, or None; `unit` is the default unit of numbers."""
        value: Any = named.get(self.name)
        if value is None or value == "":
            fitting = named.keys() & TIMES.keys()
            names = [name for name in TIMES if name in fitting and named[name] not in EMPTY] if fitting else []
            if not names:
                return None
            self.name = names[0]
            value = named[self.name]
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))  # {"$date": ...} of MongoDB
        if isinstance(value, str):
            text = value
            try:
                value = float(text)
            except ValueError:
                return self._calendar(text)
        if type(value) not in (int, float) or not 0 <= value <= _MAX_TIME:
            raise BadRecord(f"{self.name} must be a number in 0..1e20 or ISO 8601, got {shown(value)}")
        return float(value * TIME_UNITS[self._unit or TIMES[self.name] or unit])

    def _calendar(self, text: str) -> float:
        for parse in (datetime.fromisoformat, lambda text: datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z")):
            try:
                moment = parse(re.sub(r" UTC$", "Z", text.strip()))
                return (moment if moment.tzinfo else moment.replace(tzinfo=self._zone)).timestamp()
            except (ValueError, OverflowError):
                continue
        raise BadRecord(f"{self.name} must be a number in 0..1e20 or ISO 8601, got {shown(text)}")


def requests_in(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the requests of a record of a log, unwrapped: the record itself, or its spans or observations."""
    named = plain(record)
    for name in _GROUPS:
        members = parsed(named.get(name))
        if isinstance(members, list) and members and all(isinstance(member, dict) for member in members):
            for member in members:
                yield from requests_in(member)
            return
    attributes = parsed(named.get("attributes"))
    if isinstance(attributes, list):
        attributes = {pair.get("key", ""): _attribute(pair.get("value")) for pair in attributes}
    if isinstance(attributes, dict):
        named |= plain(attributes)
        named["attributes"] = None
    if attributes or any("." in name for name in named):
        named = _with_attributes(named)
    yield _unwrapped(named)


def _attribute(value: Any) -> Any:
    """Return the value of an attribute in OTLP."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    [(kind, inner)] = value.items()
    if kind == "arrayValue":
        return [_attribute(member) for member in inner.get("values", ())]
    if kind == "kvlistValue":
        return {pair["key"]: _attribute(pair.get("value")) for pair in inner.get("values", ())}
    return inner


def nested(record: Mapping[str, Any]) -> Any:
    """Return a record whose dotted names (`llm.input_messages.0.role`) are nested objects and lists."""
    root: dict[str, Any] = {}
    for name, value in record.items():
        *path, last = name.removeprefix("attributes.").split(".")
        place = root
        for part in path:
            inner = place.get(part)
            if not isinstance(inner, dict):
                inner = place[part] = {}
            place = inner
        place[last] = value if not isinstance(place.get(last), dict) else place[last]
    return _lists(root)


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    value = {name: _lists(inner) for name, inner in value.items()}
    is_list = value and all(name.isdigit() for name in value)
    return [value[name] for name in sorted(value, key=int)] if is_list else value


def _with_attributes(named: dict[str, Any]) -> dict[str, Any]:
    """Return a span's fields with its attributes under the names of a request."""
    tree = nested(named)
    spans: dict[str, Any] = {}
    for path, name in _ATTRIBUTES.items():
        value: Any = tree
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        value = parsed(value)
        if value not in EMPTY:
            spans.setdefault("prompt" if name == "messages" and isinstance(value, str) else name, value)
    whole = tree.get("input")
    if isinstance(whole, dict) and "value" in whole:
        # If messages were not recorded one by one, use the input of the whole call.
        tree["input"] = None if spans.keys() & {"messages", "prompt", "prompts"} else whole["value"]
    return {name: value for name, value in tree.items() if name not in _ROOTS} | spans


def _unwrapped(named: dict[str, Any], depth: int = 4) -> dict[str, Any]:
    """Return a record with the fields of the request that it wraps, and `is_request` if it wraps one."""
    for name in _WRAPPERS if depth else ():
        inner = parsed(named.get(name))
        if not isinstance(inner, dict) or not inner:
            continue
        inner = _unwrapped(plain(inner), depth - 1)
        if name == "invocation_parameters":
            named.setdefault("tools", inner.get("tools"))
        elif any(inner.get(body) not in EMPTY for body in (*BODIES, *TOKENS)):
            outer = {field: value for field, value in named.items() if field != name and field not in BODIES}
            named = outer | {field: value for field, value in inner.items() if value is not None} | {"is_request": True}
    return named


def reason_to_leave_out(named: Mapping[str, Any], only: Mapping[str, str]) -> str:
    """Return why a record is left out, "" for an engine's request. `only` maps fields to the values to keep."""
    for name, expected in only.items():
        value: Any = named
        for part in (name,) if name in named else name.split("."):
            value = parsed(value).get(part) if isinstance(parsed(value), dict) else None
        if str(value).lower() != expected.lower():
            return f"not {name}={expected}"
    for name in _KINDS:
        kind = named.get(name)
        if isinstance(kind, str) and kind.lower() in _NO_GENERATIONS and name not in only:
            return f"{name} {kind}"
    for name in _ROUTES:
        route = named.get(name)
        if isinstance(route, str) and name not in only and _NO_PROMPTS.search(route.lower()):
            return f"{name} {route:.40}"
    if any(str(named.get(name)).lower() in ("true", "hit", "t") for name in _CACHED if name not in only):
        return "cached answers"
    if str(named.get("status")).lower() in _FAILED and "status" not in only:
        return "failed requests"
    is_span = "span_id" in named and "trace_id" in named
    names = {*BODIES, *TOKENS, "model", "operation_name"}
    return "spans that call no model" if is_span and all(named.get(name) in EMPTY for name in names) else ""
