"""Name the format of a file that is not a trace, and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MAKE = "kvcache trace make FILE OUT"
PROMPTS = ("prompt_token_ids", "token_ids", "input_ids", "messages", "conversations", "prompt", "text", "input")
CONVERSATIONS = ("conversation", "conversation_id")
COUNTS = ("input_length", "prompt_tokens", "input_tokens")
OBJECTS = ("obj_id", "object_id", "object", "obj", "id", "key")
_LENGTHS = {
    *(*COUNTS, "contexttokens", "request_tokens", "num_prefill_tokens", "prompt_length", "prompt_len", "total_tokens"),
    *("input_lens", "input_len", "num_input_tokens"),
}
_HEADER = re.compile(r"[\ufeff\"\w ./()-]+(,[\"\w ./()-]+)+")
_EMPTY: tuple[Any, ...] = (None, "", "{}", "[]", [], {})
_RULES: tuple[tuple[set[str], str], ...] = (
    ({"hash_ids"}, "a trace, but not as JSONL: write one JSON object a line"),
    ({"custom_id", "body"}, f"a batch for OpenAI's API: jq -c .body FILE > log.jsonl, then {MAKE}"),
    ({"custom_id", "response"}, "results of a batch, which hold no prompts: take the file of its requests"),
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
        record = [name for name, value in record.items() if value not in _EMPTY]
    names = {plain_name(name) for name in record}
    for wanted, text in _RULES:
        if wanted <= names:
            return text
    if names & set(PROMPTS):
        return f"a log of prompts: {MAKE}"
    if names & set(CONVERSATIONS) and names & set(COUNTS):
        return f"token counts of conversations: {MAKE}"
    if names & _LENGTHS:
        return (
            "lengths alone, which do not say what hits: log the token ids of each prompt, or its conversation, so that "
            f"{MAKE} finds what prompts share (docs: own-traces)"
        )
    return f"accesses to another cache: {MAKE}" if names & set(OBJECTS[:4]) else ""


def describe_text(line: str) -> str:
    """Return the format of a file whose first line is not a JSON object, and the next step; "" if it is unknown."""
    if line.startswith("PAR1"):
        return f"Parquet: duckdb -c \"copy (from 'FILE') to 'log.jsonl' (format json)\", then {MAKE}"
    if line.startswith("[") and line[1:].lstrip()[:1] in ("", "{", "["):
        return "JSON, but one value over many lines or records: jq -c '.[]' FILE > lines.jsonl"
    if line.startswith("{"):
        return "JSON, but one value over many lines: jq -c . FILE > lines.jsonl" if line.rstrip()[-1] in "{,[" else ""
    if _HEADER.fullmatch(line.strip()) is None:
        return ""
    return "CSV: " + (describe(line.split(",")) or f"{MAKE} reads some")


def plain_name(name: str) -> str:
    """Return a field's or column's name in lower case, with underscores."""
    return name.strip().strip("\ufeff\"'").lower().replace(" ", "_")
