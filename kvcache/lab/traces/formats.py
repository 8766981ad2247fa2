"""Name the format of a file that is not a trace, and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcache.lab.traces.records import BODIES, EMPTY, TOKENS, plain_name

MAKE = "kvcache trace make FILE OUT"
CONVERSATIONS = ("conversation", "conversation_id")
COUNTS = ("input_length", "prompt_tokens", "input_tokens")
OBJECTS = ("obj_id", "object_id", "object", "obj", "id", "key")
_LENGTHS = {
    *(*COUNTS, "context_tokens", "request_tokens", "num_prefill_tokens", "prompt_length", "prompt_len", "total_tokens"),
    *("input_lens", "input_len", "num_input_tokens"),
}
_HEADER = re.compile(r"[\ufeff\"\w ./()-]+([,;\t|][\"\w ./()-]+)+")
_ACCESS_LOG = re.compile(r'\S+ \S+ \S+ \[[^\]]+\] "[A-Z]+ ')
_RULES: tuple[tuple[set[str], str], ...] = (
    ({"hash_ids"}, "a trace, but not as JSONL: write one JSON object a line"),
    ({"custom_id", "response"}, "results of a batch, which hold no prompts: take the file of its requests"),
    ({"custom_id", "result"}, "results of a batch, which hold no prompts: take the file of its requests"),
    (
        {"timestamp", "requests"},
        "an AIBrix workload: jq -c '.timestamp as $t | .requests[] + {timestamp: $t}' FILE > log.jsonl, "
        f"then {MAKE} --time-unit ms",
    ),
    (
        {"rid", "obj"},
        "a request log of SGLang: jq -c 'select(.out) | {timestamp, input_ids: .obj.input_ids, text: .obj.text}' "
        f"FILE > log.jsonl, then {MAKE}",
    ),
)


def describe(record: Mapping[str, Any] | Iterable[str]) -> str:
    """Return the format of a record, or of a CSV's header, and the next step; "" if it is unknown."""
    if isinstance(record, Mapping):
        record = [name for name, value in record.items() if value not in EMPTY]
    names = {plain_name(name) for name in record}
    for wanted, text in _RULES:
        if wanted <= names:
            return text
    if {"trace_id", "span_id"} <= names and not names & {*BODIES, *TOKENS}:
        return (
            "spans without prompts: let the instrumentation capture the content of messages "
            "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true)"
        )
    if names & _LENGTHS:
        return (
            "lengths alone, which do not say what hits: log the token ids of each prompt, or its conversation, so that "
            f"{MAKE} finds what prompts share (docs: own-traces)"
        )
    return ""


def describe_text(line: str) -> str:
    """Return the format of a file whose first line is not a JSON object, and the next step; "" if it is unknown."""
    if line.startswith("[") and line[1:].lstrip()[:1] in ("", "{", "["):
        return "JSON, but one value over many lines or records: jq -c '.[]' FILE > lines.jsonl"
    if line.startswith("{"):
        return "JSON, but one value over many lines: jq -c . FILE > lines.jsonl" if line.rstrip()[-1] in "{,[" else ""
    if _ACCESS_LOG.match(line):
        return (
            "an access log of nginx or Apache, which holds no prompts: log the bodies (nginx: log_format x escape=json "
            '\'{"time": "$msec", "request_body": "$request_body"}\')'
        )
    return ""


def delimiter_of(line: str) -> str:
    """Return the delimiter of a CSV's header; "" if the line is no header."""
    return max(",;\t|", key=line.count) if _HEADER.fullmatch(line.strip()) else ""
