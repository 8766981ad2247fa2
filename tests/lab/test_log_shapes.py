"""Logs as gateways, engines and clients write them: the hits of a plain simulation, or an error with the next step."""

from __future__ import annotations

import csv
import io
import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from plain_simulation import hits_of, words, write

pytest.importorskip("typer")

BLOCK = 16
START = datetime(2026, 1, 5, 14, 2, tzinfo=UTC).timestamp()
TOOLS = [{"name": "find", "description": "look up " + "a word " * 40, "input_schema": {"type": "object"}}]
SYSTEM = "you are a helpful assistant " * 12
DRAW = random.Random(5)
QUESTIONS = [" ".join(f"q{i}-{j}" for j in range(DRAW.randrange(20, 90))) for i in range(12)]
CHATS = [[{"role": "user", "content": text}] for text in QUESTIONS]
for _i in range(1, 12, 2):  # every other request continues the one before it
    CHATS[_i] = [*CHATS[_i - 1], {"role": "assistant", "content": f"a{_i} " * 25}, *CHATS[_i]]
TIMES = [START + 90 * i for i in range(12)]
ISO = [datetime.fromtimestamp(time, UTC).isoformat() for time in TIMES]


@pytest.fixture
def hits(monkeypatch, run_json):
    """Return the hits of a file in a plan without limit, and the lines that say what was read."""
    monkeypatch.setattr("kvcache.lab.traces.make.load_tokenizer", lambda name: words)

    def plan(path, *options):
        argv = ("--tokenizer", "words", "--blocks", 10_000, "--jobs", 1, "--quiet", *options)
        document = run_json("plan", path, *argv)
        cell = document["cells"][0]
        return cell["hit_blocks"], cell["blocks"], "\n".join(document["read"])

    return plan


@pytest.fixture
def refused(monkeypatch, run):
    """Return the error of a plan."""
    monkeypatch.setattr("kvcache.lab.traces.make.load_tokenizer", lambda name: words)

    def plan(path, *options):
        status, out, err = run("plan", path, "--tokenizer", "words", "--quiet", *options)
        assert (status, out) == (2, ""), out
        return err

    return plan


def tokens(*parts: Any) -> list[int]:
    """Return the tokens of a prompt of texts and messages, in order."""
    chat = [part if isinstance(part, dict) else {"role": "system", "content": part} for part in parts]
    return words(chat)


def expected(prompts):
    """Return the hits and all blocks of prompts."""
    return hits_of(prompts, BLOCK), sum(len(prompt) // BLOCK for prompt in prompts)


def tooled(chat, system=SYSTEM):
    return words([{"role": "tools", "content": json.dumps(TOOLS)}, {"role": "system", "content": system}, *chat])


def parts(chat, key="text"):
    return [{"role": one["role"], "content": [{"type": key, "text": one["content"]}]} for one in chat]


def attributes(values):
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]


def numbered(chat, form):
    return {form.format(i, name): one[name] for i, one in enumerate(chat) for name in ("role", "content")}


def span(i, values, name="chat", **more):
    span = {"traceId": "t", "spanId": f"s{i}", "name": name, "startTimeUnixNano": str(int(TIMES[i] * 1e9))}
    return span | {"attributes": attributes(values)} | more


def otlp(i, spans):
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "x"}, "spans": spans}]}]}


def whole(chat):
    return {"tools": TOOLS, "system": SYSTEM, "messages": chat, "model": "m", "max_tokens": 5}


def openai(chat):
    return {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, *chat]}


def gemini(chat, system="systemInstruction"):
    contents = [
        {"role": one["role"].replace("assistant", "model"), "parts": [{"text": one["content"]}]} for one in chat
    ]
    return {"contents": contents, system: {"parts": [{"text": SYSTEM}]}, "generationConfig": {"topK": 5}}


def converse(chat):
    messages = [{"role": one["role"], "content": [{"text": one["content"]}]} for one in chat]
    return {"system": [{"text": SYSTEM}, {"cachePoint": {"type": "default"}}], "messages": messages}


RESPONSE = {"id": "r", "choices": [{"message": {"role": "assistant", "content": "an answer of the model"}}]}
SHAPES = {
    "anthropic": (lambda i, chat: whole(chat) | {"created_at": ISO[i]}, "tools"),
    "anthropic parts": (lambda i, chat: whole(parts(chat)) | {"system": [{"type": "text", "text": SYSTEM}]}, "tools"),
    "anthropic batch": (lambda i, chat: {"custom_id": f"r{i}", "params": whole(chat)}, "tools"),
    "openai batch": (
        lambda i, chat: {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": openai(chat)},
        "system",
    ),
    "responses": (
        lambda i, chat: {"instructions": SYSTEM, "input": parts(chat, "input_text"), "created": TIMES[i], "text": {}},
        "system",
    ),
    "stored completions": (
        lambda i, chat: {
            "object": "chat.completion",
            "id": "r",
            "created": TIMES[i],
            "input": openai(chat)["messages"],
        },
        "system",
    ),
    "proxy": (lambda i, chat: {"request": whole(chat), "response": RESPONSE, "ts": TIMES[i]}, "tools"),
    "proxy of text": (
        lambda i, chat: {"time": ISO[i], "request": {"method": "POST", "body": json.dumps(whole(chat))}},
        "tools",
    ),
    "nginx": (lambda i, chat: {"msec": str(TIMES[i]), "request_body": json.dumps(openai(chat))}, "system"),
    "litellm": (
        lambda i, chat: {
            "startTime": ISO[i],
            "endTime": ISO[-1],
            "model": "m",
            "cache_hit": "False",
            "messages": json.dumps(chat),
            "proxy_server_request": json.dumps(whole(chat)),
            "prompt_tokens": 5,
            "session_id": "s",
        },
        "tools",
    ),
    "langfuse": (
        lambda i, chat: {"id": i, "type": "GENERATION", "startTime": ISO[i], "input": openai(chat), "output": "fine"},
        "system",
    ),
    "langfuse traces": (
        lambda i, chat: {
            "timestamp": ISO[i],
            "input": openai(chat),
            "observations": [
                {"type": "SPAN", "startTime": ISO[i], "input": openai(chat)},
                {"type": "GENERATION", "startTime": ISO[i], "input": openai(chat)["messages"]},
            ],
        },
        "system",
    ),
    "helicone": (
        lambda i, chat: {"request_created_at": ISO[i], "request_body": whole(chat), "response_body": RESPONSE},
        "tools",
    ),
    "bedrock": (
        lambda i, chat: {"timestamp": ISO[i], "operation": "Converse", "input": {"inputBodyJson": converse(chat)}},
        "system",
    ),
    "gemini": (lambda i, chat: gemini(chat), "system"),
    "vertex batch": (lambda i, chat: {"request": gemini(chat, "system_instruction")}, "system"),
    "gen_ai messages": (
        lambda i, chat: otlp(
            i,
            [
                span(i, {"http.method": "POST"}, "POST"),
                span(
                    i,
                    {
                        "gen_ai.operation.name": "chat",
                        "gen_ai.request.model": "m",
                        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": SYSTEM}]),
                        "gen_ai.input.messages": json.dumps(
                            [{"role": m["role"], "parts": [{"type": "text", "content": m["content"]}]} for m in chat]
                        ),
                    },
                ),
            ],
        ),
        "system",
    ),
    "gen_ai prompts": (
        lambda i, chat: otlp(i, [span(i, numbered(openai(chat)["messages"], "gen_ai.prompt.{}.{}"))]),
        "system",
    ),
    "phoenix": (
        lambda i, chat: {
            "start_time": ISO[i],
            "span_kind": "LLM",
            "attributes.llm.input_messages": [
                {f"message.{name}": value for name, value in one.items()} for one in openai(chat)["messages"]
            ],
            "attributes.input.value": json.dumps(openai(chat)),
        },
        "system",
    ),
    "openinference": (
        lambda i, chat: otlp(
            i,
            [
                span(i, {"openinference.span.kind": "CHAIN", "input.value": "a chain"}),
                span(
                    i,
                    {"openinference.span.kind": "LLM"}
                    | numbered(openai(chat)["messages"], "llm.input_messages.{}.message.{}"),
                ),
            ],
        ),
        "system",
    ),
    "wildchat": (lambda i, chat: {"conversation": chat, "turn": 1, "model": "m", "toxic": False}, ""),
    "lmsys": (lambda i, chat: {"conversation_id": f"c{i}", "conversation": chat, "turn": 1}, ""),
    "cohere": (
        lambda i, chat: {
            "preamble": SYSTEM,
            "chat_history": [
                {"role": {"user": "USER"}.get(m["role"], "CHATBOT"), "message": m["content"]} for m in chat[:-1]
            ],
            "message": chat[-1]["content"],
        },
        "system",
    ),
    "langchain": (
        lambda i, chat: {
            "run_type": "llm",
            "start_time": ISO[i],
            "inputs": {
                "messages": [
                    [
                        {
                            "lc": 1,
                            "kwargs": {"type": {"user": "human", "assistant": "ai"}.get(m["role"], m["role"]), **m},
                        }
                        for m in openai(chat)["messages"]
                    ]
                ]
            },
        },
        "system",
    ),
    "docker log": (
        lambda i, chat: {"log": json.dumps(openai(chat)) + "\n", "stream": "stdout", "time": ISO[i]},
        "system",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_gives_its_hits(tmp_path, hits, name):
    record, begins = SHAPES[name]
    path = write(tmp_path / "log.jsonl", [record(i, chat) for i, chat in enumerate(CHATS)])
    prompts = [tooled(chat) if begins == "tools" else tokens(*[SYSTEM] * bool(begins), *chat) for chat in CHATS]
    found = hits(path)
    assert found[:2] == expected(prompts)
    assert "ignored" not in found[2]
    assert found[2].startswith("12 requests")


def log(tmp_path, records):
    return write(tmp_path / "log.jsonl", records)


def chats_of(prompts):
    return [{"messages": chat, "startTime": time} for chat, time in zip(prompts, ISO, strict=True)]


PLAIN = expected([tokens(*chat) for chat in CHATS])


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ({"type": "GENERATION"}, [{"type": "SPAN"}, {"type": "AGENT"}, {"type": "TOOL"}, {"type": "EMBEDDING"}]),
        ({"span_kind": "LLM"}, [{"span_kind": "CHAIN"}, {"span_kind": "AGENT"}]),
        ({"call_type": "acompletion"}, [{"call_type": "aembedding"}, {"url": "https://x/v1/embeddings"}]),
        ({"status": "success"}, [{"status": "failure"}]),
        ({"cache_hit": "None"}, [{"cache_hit": "True"}, {"cached": True}, {"cacheHit": "true"}]),
    ],
)
def test_rows_without_request_are_omitted(tmp_path, hits, kind, others):
    records = [record | more for record in chats_of(CHATS) for more in (*others, kind)]
    found = hits(log(tmp_path, records))
    assert found[:2] == PLAIN
    assert "left out: " in found[2]
    assert f"({12 if len(others) != 3 else 36})" in found[2]


def test_records_of_other_kinds_are_refused(tmp_path, refused, hits):
    path = log(tmp_path, [record | {"type": "AGENT"} for record in chats_of(CHATS)])
    assert "holds no request (12 type AGENT)" in refused(path)
    assert hits(path, "--only", "type=AGENT")[:2] == PLAIN


def test_models_share_no_blocks(tmp_path, hits):
    records = [record | {"model": model} for record in chats_of(CHATS) for model in ("a", "b", "b")]
    found = hits(log(tmp_path, records))
    num_hits, num_blocks = expected([tokens(*chat) for chat in CHATS for _ in range(2)])
    assert found[:2] == (PLAIN[0] + num_hits, PLAIN[1] + num_blocks)
    assert "36 requests of 2 models" in found[2]
    assert "models, which share no blocks: b (24), a (12)" in found[2]
    one = hits(tmp_path / "log.jsonl", "--only", "model=a")
    assert one[:2] == PLAIN
    assert "of a, prompts of `messages`, 2026-01-05 14:02 to 14:18 UTC" in one[2]


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "model", "bot", "bard", "ai", "Assistant"])
def test_roles_of_answers_are_known(tmp_path, hits, role):
    turns = [[("human", f"{text} "), (role, f"a{i} " * 30)] * 3 for i, text in enumerate(QUESTIONS)]
    records = [{"conversations": [{"from": who, "value": text} for who, text in chat]} for chat in turns]
    names = {"human": "user"}
    prompts = [
        words([{"role": names.get(who, "assistant"), "content": text} for who, text in chat[:end]])
        for chat in turns
        for end in (1, 3, 5)
    ]
    assert hits(log(tmp_path, records))[:2] == expected(prompts)


REFUSED = {
    "responses chained": ({"input": "hi", "previous_response_id": "r"}, "previous_response_id: the earlier turns"),
    "gemini cached": (gemini(CHATS[0]) | {"cachedContent": "c"}, "cached_content: the cached beginning"),
    "stored prompt": ({"prompt": {"id": "pmpt_1", "variables": {}}}, "the text of a stored prompt"),
    "ollama context": ({"prompt": "hi", "context": [1, 2]}, "context: the earlier turns"),
    "bedrock in s3": ({"input": {"inputBodyS3Path": "s3://x"}, "input_body_s3_path": "x"}, "the body of the request"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "a part of type 'image_url', whose tokens are unknown: log token ids",
    ),
    "gemini image": ({"contents": [{"parts": [{"inlineData": {"data": "x"}}]}]}, "a part of type 'inlineData'"),
    "role": ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown role 'narrator' in conversations"),
    "two prompts": ({"prompt": "a b", "text": "c d"}, "prompt and text may each hold the prompt: name its fields"),
    "batch results": ({"custom_id": "r", "response": {"body": {}}}, "results of a batch"),
    "anthropic results": ({"custom_id": "r", "result": {"type": "succeeded"}}, "results of a batch"),
    "span": (otlp(0, [span(0, {"gen_ai.operation.name": "chat"})]), "let the instrumentation capture the content"),
    "embedding": ({"input": ["a b", "c d"]}, "input must be ints"),
    "repr": ({"messages": "[{'role': user}]"}, "messages must be messages as JSON"),
    "question": ({"question": "what is it"}, "or --prompt-fields), has 'question'"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("skipped", [(), ("--skip-bad",)])
def test_shape_is_refused_with_next_step(tmp_path, refused, name, skipped):
    record, message = REFUSED[name]
    assert message in refused(log(tmp_path, [record] * 3), *skipped)


@pytest.mark.parametrize("skipped", [(), ("--skip-bad",)])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '1.2.3.4 - - [10/Oct/2026:13:55:36 +0000] "POST /v1/chat/completions HTTP/1.1" 200 2326',
            "access log of nginx",
        ),
        ("INFO 10-10 13:55:36 [api_server.py:1289] vLLM API server version 0.9.1", "vLLM's log without prompts"),
    ],
)
def test_text_log_without_prompts_is_named(tmp_path, refused, line, message, skipped):
    (tmp_path / "server.log").write_text(f"{line}\n" * 3)
    assert message in refused(tmp_path / "server.log", *skipped)


def test_log_of_vllm_is_read(tmp_path, hits):
    lines = ["INFO 02-29 13:59:00 [api_server.py:1289] vLLM API server version 0.9.1"]
    for i, chat in enumerate(CHATS):
        text = " ".join(f"{one['role']} {one['content']}" for one in chat) + "\n it's"
        lines.append(
            f"INFO 02-29 14:{i:02}:00 [logger.py:43] Received request cmpl-{i}: prompt: {text!r}, params: "
            "SamplingParams(n=1, stop=[]), prompt_token_ids: None, lora_request: None."
        )
        lines.append(f'INFO:     127.0.0.1:{i} - "POST /v1/completions HTTP/1.1" 200 OK')
    (tmp_path / "vllm.log").write_text("\n".join(lines))
    found = hits(tmp_path / "vllm.log")
    assert found[:2] == expected([[*tokens(*chat), *words("it's")] for chat in CHATS])
    assert "over 11 min 00 s" in found[2]
    ids = [[*range(40), *range(1000 * i, 1000 * i + 50)] for i in range(5)]
    lines[1:] = [f"INFO 02-29 14:00:00 [x] Received request a: prompt: 'x', prompt_token_ids: {row}, y" for row in ids]
    (tmp_path / "vllm.log").write_text("\n".join(lines))
    assert hits(tmp_path / "vllm.log")[:2] == expected(ids)


@pytest.mark.parametrize("form", [",", ";", "\t", "utf-16", "commas", "repr"])
def test_table_or_lines_of_any_form(tmp_path, hits, form):
    path = tmp_path / "log.csv"
    rows = [{"startTime": time, "messages": json.dumps(chat)} for chat, time in zip(CHATS, ISO, strict=True)]
    if form == "repr":
        rows = [row | {"messages": repr(json.loads(row["messages"]))} for row in rows]
    if form == "commas":
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(row) + ",\n" for row in rows))
    else:
        text = io.StringIO()
        table = csv.DictWriter(text, rows[0], delimiter=form if len(form) == 1 else ",")
        table.writeheader()
        table.writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-16" if form == "utf-16" else "utf-8", newline="")
    found = hits(path)
    assert found[:2] == PLAIN
    assert "14:02 to 14:18 UTC" in found[2]


def test_long_cell_of_csv_is_read(tmp_path, hits):
    text = " ".join(f"w{i}" for i in range(40_000))
    (tmp_path / "log.csv").write_text(f'time,prompt\n1,"{text}"\n2,"{text}"\n')
    assert hits(tmp_path / "log.csv")[:2] == expected([words(text)] * 2)


MAGIC = {
    "bzip2: bzip2 -dc": b"BZh91AY&SY",
    "xz: xz -dc": b"\xfd7zXZ\0\0",
    "zip: unzip -p": b"PK\x03\x04",
    "SQLite: sqlite3 -json": b"SQLite format 3\0",
    "Parquet: duckdb": b"PAR1",
    "7z: 7z x": b"7z\xbc\xaf'\x1c",
    "a tar archive: tar -xOf": b"a" * 257 + b"ustar",
    "binary: write it as JSONL": b"abc\0\0def",
}


@pytest.mark.parametrize("message", MAGIC)
def test_packed_file_is_named(tmp_path, refused, message):
    (tmp_path / "log").write_bytes(MAGIC[message] + b"\0rest")
    for options in ((), ("--skip-bad",)):
        assert f"log is {message}" in refused(tmp_path / "log", *options)


@pytest.mark.parametrize("cached", [{}, {"cache_read_input_tokens": 1, "cache_creation_input_tokens": 1}])
def test_counts_include_cached_tokens(tmp_path, hits, refused, cached):
    records, prompts = [], []
    for chat in range(8):
        length = 300 + 40 * chat
        for turn in range(6):
            counts = {"input_tokens": 3 + turn % 4, **cached}
            if cached:
                counts |= {"cache_read_input_tokens": length - 200, "cache_creation_input_tokens": 197 - turn % 4}
            records.append({"conversation_id": chat, "turn": turn, "time": turn * 60 + chat, "usage": counts})
            prompts.append((turn * 60 + chat, [(chat, i) for i in range(length)]))
            length += 170
    path = log(tmp_path, records)
    if not cached:
        assert "prompts of 3 to 6 tokens: these are not the lengths of whole prompts" in refused(path)
        return
    found = hits(path)
    assert found[:2] == expected([prompt for _, prompt in sorted(prompts)])
    assert "`input_tokens` + `cache_read_input_tokens` + `cache_creation_input_tokens`" in found[2]


def test_ignored_fields_are_named_once(tmp_path, hits):
    context = "a context that all prompts share " * 20
    records = [record | {"context": context, "user": "a b", "note": "x"} for record in chats_of(CHATS)]
    found = hits(log(tmp_path, records))
    assert found[:2] == PLAIN
    assert "ignored: `context`; if it is part of the prompt: --prompt-fields" in found[2]
    found = hits(tmp_path / "log.jsonl", "--prompt-fields", "context,messages")
    assert found[:2] == expected([tokens(context, *chat) for chat in CHATS])
    assert "ignored" not in found[2]


def test_several_prompts_are_several_requests(tmp_path, hits):
    texts = [" ".join(chat[-1]["content"] for chat in CHATS[:i]) for i in range(1, 6)]
    assert hits(log(tmp_path, [{"prompt": texts[:3]}, {"prompt": texts[3:]}]))[:2] == expected(list(map(words, texts)))
    ids = [[*range(20 * i)] for i in range(1, 6)]
    assert hits(log(tmp_path, [{"prompt": ids[0]}, {"prompt": ids[1:]}]))[:2] == expected(ids)


def test_prefilled_answer_is_part_of_prompt(tmp_path, hits):
    chats = [[*chat, {"role": "assistant", "content": "the answer is " * 9}] for chat in CHATS]
    records = [{"custom_id": "r", "params": whole(chat)} for chat in chats]
    assert hits(log(tmp_path, records))[:2] == expected([tooled(chat) for chat in chats])


@pytest.mark.parametrize("first", [0, 5, 40])
def test_deltas_with_short_first_turn(tmp_path, hits, first):
    lines, prompts, number = [], [], 0
    for session in range(20):
        prompt: list[Any] = [(session, "own", i) for i in range(first)]
        lines.append({"session_id": session, "timestamp": session, "input_length": first, "output_length": 7})
        lines[-1]["hash_ids"] = [[9], []][first < 512] * (first >= 512)
        prompts.append((session, list(prompt)))
        for turn in range(1, 4):
            prompt += [(session, turn, "answer", i) for i in range(7)]
            prompt += [(number, i) for i in range(512)]
            time = 1000 * turn + session
            lines.append({"session_id": session, "timestamp": time, "input_length": 512, "output_length": 7})
            lines[-1]["hash_ids"] = [number := number + 1]
            prompts.append((time, list(prompt)))
    assert hits(log(tmp_path, lines))[:2] == expected([prompt for _, prompt in sorted(prompts, key=lambda row: row[0])])


@pytest.mark.parametrize(
    ("zone", "span"),
    [((), "2026-03-28 12:00 to 2026-03-29 11:50 UTC"), (("--time-zone", "Europe/Berlin"), "11:00 to 2026-03-29 09:50")],
)
def test_naive_times_are_utc(tmp_path, hits, monkeypatch, zone, span):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    records = [{"timestamp": f"2026-03-{day}", "prompt": "x y"} for day in ("28 12:00:00", "29 11:50:00")]
    assert span in hits(log(tmp_path, records), *zone)[2]


def test_newest_first_is_sorted(tmp_path, hits):
    found = hits(log(tmp_path, chats_of(CHATS)[::-1]))
    assert found[:2] == PLAIN
    assert found[2].endswith("14:02 to 14:18 UTC, sorted")


def test_counts_beside_prompts_are_not_read(tmp_path, hits):
    counts = {"conversation_id": "c", "prompt_tokens": 900}
    assert hits(log(tmp_path, [record | counts for record in chats_of(CHATS)]))[:2] == PLAIN
    rows = [[*range(40 + 5 * i)] for i in range(9)]
    assert hits(log(tmp_path, [counts | {"token_ids": row} for row in rows]))[:2] == expected(rows)


def test_timestamp_of_trace_is_its_time(tmp_path, hits):
    same = {"input_length": 512, "hash_ids": [1], "startTime": ISO[0]}
    assert "over 5 s" in hits(log(tmp_path, [same | {"timestamp": 1000 * i} for i in range(6)]))[2]
