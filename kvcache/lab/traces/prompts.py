"""Find the prompt of a record: all fields that are part of it, in the order in which engines render them.

Each field of a record is in one of three lists: part of the prompt (`PARTS` and the bodies), known and not part of it
(`KNOWN`), or unknown. Reports name unknown fields that hold text.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvcache.lab.traces.formats import describe
from kvcache.lab.traces.records import BODIES, EMPTY, TIMES, TOKENS, nested, parsed, shown
from kvcache.lab.traces.requests import BadRecord

_TOOLS = ("tools", "functions", "tool_config")
_SYSTEM = ("documents", "system", "system_prompt", "system_instruction", "system_instructions", "preamble")
PARTS = (*_TOOLS, *_SYSTEM, "instructions", "chat_history", "instruction")
"""Fields that are part of a prompt before its last part."""
_MAX_TOKEN = (1 << 31) - 1
_CHATS = ("messages", "conversations", "conversation", "contents")
ELSEWHERE = {
    "previous_response_id": "the earlier turns of the conversation",
    "cached_content": "the cached beginning",
    "context": "the earlier turns of the conversation as token ids",
    "input_body_s3_path": "the body of the request",
    "prompt_embeds": "embeddings",
    "multi_modal_data": "images, audio or video",
    "image_data": "images",
    "images": "images",
    "mm_payload": "images, audio or video",
    "previous_input_messages": "the earlier turns of the conversation",
    "truncate_prompt_tokens": "the places where it was cut",
}
"""Parts of a prompt that a record names, but does not hold."""
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "model", "bot", "ai", "chatbot", "bard", "bing", "claude", "function_call"),
        "assistant",
    ),
    **dict.fromkeys(("tool_call", "tool_calls"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("tool_result", "function_call_output"), "tool"),
}
_CONTENTS = ("content", "value", "parts", "contents", "message", "text", "output", "arguments")
_KEPT = ("tool_calls", "function_call", "name", "tool_call_id", "reasoning_content")
_TEXTS = ("text", "content", "refusal")
_CALLS = {"tool_use", "tool_call", "function_call", "functionCall", "toolUse", "json"}
_RESULTS = {"tool_result", "tool_call_response", "functionResponse", "toolResult"}
# Engines leave out the reasoning of earlier turns; a cache point is a marker without content.
_UNRENDERED = {"thinking", "redacted_thinking", "reasoning", "reasoningContent", "cachePoint", "thought"}
_KNOWN = """
_id account_id add_generation_prompt add_special_tokens allowed_openai_params allowed_token_ids answer answers
anthropic_beta anthropic_version api_base api_key audio background bad_words best_of betas cache cache_key cache_salt
calculated_total_cost candidates candidates_token_count chat_id choices chosen completed_at completion
completion_start_time completions continue_final_message conversation_hash conversation_id cost cost_details costs
country custom_id custom_llm_provider description detoxify_moderation dropped_attributes_count duration
ec_transfer_params echo enable_response_messages end_time end_user ended_at endpoint environment error evaluation event
events events_count exception expected extra extra_headers feedback finish_reason flags format frequency_penalty
function_call generated_text generation_config guardrail_config guided_choice guided_decoding_backend guided_grammar
guided_json guided_regex hashed_ip header headers hidden_params host id identity ids ignore_eos include
include_reasoning include_stop_str_in_output inference_config invocation_parameters ip is_request keep_alive key_alias
key_hash kind kv_transfer_params label labels language latency length_penalty level links litellm_params log_format
logger logit_bias logit_processors logits_processors logprob_token_ids logprobs max_completion_tokens max_output_tokens
max_tokens max_tool_calls media_io_kwargs message_id metadata method min_p min_tokens mm_processor_kwargs modalities
model model_group model_id model_info model_map_information model_parameters moderation n name names num_retries object
openai_moderation operation options organization out output output_config output_messages outputs parallel_tool_calls
parameters params parent_id parent_observation_id parent_span_id path prediction presence_penalty priority project
project_id prompt_cache_key prompt_cache_options prompt_cache_retention prompt_id prompt_logprobs prompt_name
prompt_version properties provider raw raw_response reasoning redacted referer region rejected release
repetition_detection repetition_penalty request_headers request_id request_tags requester_ip_address resource response
response_body response_format response_headers response_id response_json responses result results return_mm_kwargs
return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions rid route
routed_experts_prompt_start safety_identifier safety_settings sampling sampling_params schema scope scores seed
service_tier session_id severity skip_special_tokens spaces_between_special_tokens span_attributes span_id spend
standard_logging_object state stats status status_code status_message stop stop_reason stop_sequences stop_token_ids
store stream stream_interval stream_options structured_outputs tags team_id telemetry temperature text thinking
thinking_config thinking_token_budget thread_id time_to_first_token timeout tool_choice tool_params top_k top_logprobs
top_p total_cost toxic trace_id trace_state truncation truncation_side turn type updated_at url usage usage_details
usage_metadata use_beam_search user user_agent user_id verbosity version vllm_xargs watermarking web_search_options
"""
KNOWN = frozenset(_KNOWN.split())
"""Fields that are not part of a prompt; `text` only if it is an object, as in OpenAI's Responses."""


def fields_of(named: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that make up the prompt of a record, in order; BadRecord if it is unclear."""
    for name in TOKENS:
        if isinstance(parsed(named.get(name)), list):
            return (name,)
    for name, what in ELSEWHERE.items():
        if (value := named.get(name)) not in EMPTY and not (name == "context" and isinstance(value, str)):
            raise BadRecord(f"{name}: {what} are part of the prompt, but not of the log: log whole prompts")
    if isinstance(named.get("conversation"), dict) or str(named.get("conversation")).startswith("conv_"):
        raise BadRecord("conversation: its earlier turns are part of the prompt, but not of the log: log whole prompts")
    bodies = [name for name in BODIES if _is_body(name, named)]
    if not bodies and named.get("instruction") not in EMPTY:
        bodies = ["instruction"]
    if len(bodies) > 1 and len({json.dumps(parsed(named[name])) for name in bodies}) > 1:
        raise BadRecord(
            f"{' and '.join(bodies)} may each hold the prompt: name its fields, as in --prompt-fields {bodies[0]}"
        )
    if not bodies:
        known = describe({name: value for name, value in named.items() if name not in (*BODIES, *PARTS)})
        expected = ", ".join((*TOKENS, *BODIES))
        hint = f"must have token ids or text under one of {expected} (or --prompt-fields), has "
        raise BadRecord(known or hint + shown(", ".join(named)))
    parts = tuple(name for name in PARTS if named.get(name) not in EMPTY and name != bodies[0])
    return (*parts, bodies[0])


def _is_body(name: str, named: Mapping[str, Any]) -> bool:
    value = parsed(named.get(name))
    if name == "message" and not named.keys() & {"chat_history", "preamble"}:
        return False
    if isinstance(value, dict) and "id" in value and name == "prompt":
        raise BadRecord("prompt: the text of a stored prompt is not part of the log: log whole prompts")
    if name == "conversation" and isinstance(value, str) and value[:1] not in ("[", "{"):
        return False  # its name
    value = named.get(name) if name in ("prompt", "text", "inputs", "text_input", "input_text") else value
    return isinstance(value, str | list) and (value not in EMPTY or (name == "prompt" and value == []))


def unknown_fields(named: Mapping[str, Any], fields: Iterable[str]) -> list[str]:
    """Return the names of fields that hold text or lists and are neither read nor known."""
    if any(name in TOKENS for name in fields):
        return []  # engines have rendered all others into the token ids
    names = [name for name in named if name not in KNOWN and name not in TIMES and name not in fields]
    return [name for name in names if _is_text(parsed(named[name]))]


def _is_text(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) > 80 or (" " in value.strip() and not value[:4].isdigit())
    return isinstance(value, list | dict) and bool(value)


def prompts_of(named: Mapping[str, Any], fields: Sequence[str]) -> list[Any]:
    """Return the prompts of a record: each is a list of token ids, a text, or a list of chat messages.

    A completion with several prompts is several requests. The descriptions of tools are a first message of the role
    ``tools``.
    """
    items: list[Any] = []
    for name in fields:
        value = _meant(named.get(name), name)
        if value in EMPTY and name not in (*TOKENS, "prompt"):
            continue
        if name in _TOOLS:
            items.append([{"role": "tools", "content": json.dumps(value)}])
        elif name in (*_SYSTEM, "instructions"):
            text = json.dumps(value) if name == "documents" else text_of(value)
            items.append([{"role": "system", "content": text}])
        else:
            items.append(_body(value, name))
    several = items[-1] if items else None
    if isinstance(several, tuple):
        return [_joined([*items[:-1], prompt]) for prompt in several]
    return [_joined(items)]


def _meant(value: Any, name: str) -> Any:
    """Return the list in a JSON text, unless the text itself is the prompt."""
    whole = parsed(value)
    if not isinstance(value, str) or name in (*_CHATS, *PARTS, *TOKENS):
        return whole
    is_list = isinstance(whole, list) and (
        all(type(member) is int for member in whole)
        or all(isinstance(member, dict) and member.keys() & {"role", "from"} for member in whole)
    )
    return whole if is_list else value


def _body(value: Any, name: str) -> Any:
    """Return a part of a prompt: token ids, a text, messages, or a tuple of several prompts."""
    if isinstance(value, str):
        is_list = name in _CHATS and value.lstrip()[:1] in ("[", "{")
        return _messages(_literal(value, name), name) if is_list else value
    if isinstance(value, dict):
        return _messages([value], name)
    if all(isinstance(member, dict) for member in value) and value:
        return _messages(value, name)
    if name in _CHATS and len(value) == 1 and isinstance(value[0], list):
        return _messages(value[0], name)
    if name in ("prompt", "prompts") and value and all(isinstance(member, str) for member in value):
        return tuple(value)
    if name == "prompt" and value and all(isinstance(member, list) for member in value):
        return tuple(_tokens(member, name) for member in value)
    return _tokens(value, name)


def _literal(text: str, name: str) -> list[Any]:
    """Parse a list in Python's syntax, as pandas writes it to CSV."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise BadRecord(f"{name} must be messages as JSON, got {shown(text)}: write JSONL instead of CSV")
    return value


def _tokens(value: list[Any], name: str) -> list[int]:
    for token in value:
        if name in _CHATS:
            raise BadRecord(f"{name} must be messages with roles, got {shown(token)}")
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
            raise BadRecord(f"{name} must be ints in 0..2**31-1, got {shown(token)}")
    return value


def _joined(items: list[Any]) -> Any:
    """Join the parts of a prompt: token ids, texts as lines, or messages, to which texts are added as messages."""
    if all(isinstance(item, list) and not any(isinstance(one, dict) for one in item) for item in items):
        return [token for item in items for token in item]
    if all(isinstance(item, str) for item in items):
        return "\n".join(items)
    chat: list[dict[str, Any]] = []
    last_chat = max(i for i, item in enumerate(items) if not isinstance(item, str))
    for i, item in enumerate(items):
        # A text before the messages is a system message.
        role = "system" if i < last_chat else "user"
        for message in [{"role": role, "content": item}] if isinstance(item, str) else item:
            if type(message) is int:
                raise BadRecord("token ids and text cannot be one prompt: log the token ids of the whole prompt")
            if chat and message["role"] == chat[-1]["role"] == "system":
                chat[-1] = chat[-1] | {"content": f"{chat[-1]['content']}\n{message['content']}"}
            else:
                chat.append(message)
    return chat


def _messages(items: list[Any], name: str) -> list[dict[str, Any]]:
    """Return chat messages of any format as `role` and `content`; BadRecord if a role or content is unknown."""
    chat = []
    for item in items:
        if not isinstance(item, dict):
            raise BadRecord(f"{name} must be messages, got {shown(item)}")
        message = nested(item) if any("." in field for field in item) else item
        for wrapper in ("kwargs", "message"):  # LangChain, OpenInference
            message = message[wrapper] if isinstance(message.get(wrapper), dict) else message
        role = next((message[field] for field in ("role", "from", "type") if message.get(field)), None)
        if role in _UNRENDERED:
            continue
        role = "user" if role is None and name == "contents" else role
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise BadRecord(f"unknown role {shown(role)} in {name}: known roles are {', '.join(_ROLES)}")
        content = next((message[field] for field in _CONTENTS if message.get(field) not in (None, [])), "")
        if role == "function_call":
            content = json.dumps({"name": message.get("name"), "arguments": content})
        kept = {field: message[field] for field in _KEPT if message.get(field) and role != "function_call"}
        chat.append({**kept, "role": _ROLES[role.lower()], "content": text_of(content)})
    return chat


def text_of(content: Any) -> str:
    """Return the text of a content of many parts; BadRecord if a part is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(filter(None, map(text_of, content)))
    if not isinstance(content, dict):
        raise BadRecord(f"content must be text, got {shown(content)}")
    if isinstance(content.get("message_content"), dict):  # OpenInference
        content = content["message_content"]
    kind = content.get("type") or next(iter(content), "")
    if kind in _UNRENDERED:
        return ""
    if kind in _CALLS:
        return json.dumps(content)
    if kind in _RESULTS:
        inner = content.get(kind) if isinstance(content.get(kind), dict) else content
        value = next((inner[name] for name in ("content", "response", "result", "output") if name in inner), "")
        return text_of(value) if isinstance(value, str | list) else json.dumps(value)
    if isinstance(content.get("parts"), list):
        return text_of(content["parts"])
    text: str | None = next((content[name] for name in _TEXTS if isinstance(content.get(name), str)), None)
    if text is None:
        raise BadRecord(
            f"a prompt with a part of type {shown(str(kind))}, whose tokens are unknown: log token ids "
            "(docs: own-traces), or leave such records out (--skip-bad)"
        )
    return text
