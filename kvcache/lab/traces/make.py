"""Make a trace from any file of requests: a log of prompts, token counts, or accesses to another cache."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcache.lab.simulate.reading import doubts, lines_read
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.requests import Request, Tokenize, TraceFile


@dataclass(slots=True)
class MadeTrace:
    """The result of `make_trace`.

    `late_requests` were out of order and were sorted. `read` and `doubts` are report lines: on the log, on its times.
    """

    block_size: int
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    skipped_records: int = 0
    late_requests: int = 0
    untimed_requests: int = 0
    read: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def make_trace(
    trace: TraceFile,
    write: Callable[[str], object],
    split: int = 1,
    progressed: Callable[[int, int], None] = lambda requests, position_bytes: None,
) -> MadeTrace:
    """Write requests as Mooncake JSONL in order of time, with the size of a block on each line.

    `write` takes each line. Each block is written as `split` blocks. `progressed` takes the number of requests and of
    bytes read so far. TraceError if the file cannot be read or holds a bad record.
    """

    def requests() -> Iterator[Request]:
        for number, request in enumerate(trace, 1):
            progressed(number, trace.position_bytes)
            yield request

    with tempfile.TemporaryDirectory(prefix="kvcache-trace-") as folder:
        compact = CompactTrace.spool(requests(), trace.block_size, Path(folder))
        made = MadeTrace(
            trace.block_size // split,
            len(compact),
            compact.num_blocks * split,
            compact.num_tokens,
            trace.num_skipped,
            compact.num_late,
            trace.num_untimed,
            lines_read(trace, compact),
            doubts(compact, trace.num_untimed),
        )
        outputs = compact.output_lengths
        for i, request in enumerate(compact.split(split) if split > 1 else compact):
            line = {
                "timestamp": round((request.arrival_s - float(compact.arrivals_s[0])) * 1000, 3),
                "input_length": request.input_length,
                "output_length": 0 if outputs is None else int(outputs[i]),
                "hash_ids": request.hash_ids.tolist(),
                "block_size": made.block_size,
            }
            write(json.dumps(line) + "\n")
    return made


def load_tokenizer(name: str) -> Tokenize:
    """Return a function that turns text, or a list of chat messages, into token ids.

    `name` is a folder, or a name on the Hugging Face hub. A first message of the role ``tools`` describes tools; if the
    chat template does not render tools or calls of tools, they become text.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    template = str(getattr(tokenizer, "chat_template", None))

    def tokenize(prompt: Any) -> Iterable[int]:
        if isinstance(prompt, str):
            return tokenizer(prompt)["input_ids"]  # type: ignore[no-any-return]
        tools, chat = (prompt[0]["content"], prompt[1:]) if prompt[0]["role"] == "tools" else ("", prompt)
        if tools and "tools" not in template:
            is_merged = chat and chat[0]["role"] == "system"
            text = f"{tools}\n{chat[0]['content']}" if is_merged else tools
            chat, tools = [{"role": "system", "content": text}, *chat[1 if is_merged else 0 :]], ""
        chat = [_call_as(message, "tool_calls" in template) for message in chat]
        return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            chat, tools=_described(tools) if tools else None, add_generation_prompt=True, return_dict=True
        )["input_ids"]

    return tokenize


def _described(text: str) -> list[Any]:
    """Return tools as chat templates take them: functions in OpenAI's form."""
    tools = json.loads(text)
    tools = tools.get("tools", [tools]) if isinstance(tools, dict) else tools
    return [
        tool
        if not isinstance(tool, dict) or "function" in tool
        else {"type": "function", "function": {"parameters": tool.get("input_schema", {}), **tool}}
        for tool in tools
    ]


def _call_as(message: dict[str, Any], is_rendered: bool) -> dict[str, Any]:
    """Return a message whose calls of tools a chat template renders: with arguments as objects, or in its text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    if not is_rendered:
        return message | {"content": message["content"] + json.dumps(calls), "tool_calls": None}
    calls = [call | {"function": _with_object(call.get("function"))} if "function" in call else call for call in calls]
    return message | {"tool_calls": calls}


def _with_object(function: Any) -> Any:
    try:
        return function | {"arguments": json.loads(function["arguments"])}
    except (TypeError, ValueError, KeyError):
        return function
