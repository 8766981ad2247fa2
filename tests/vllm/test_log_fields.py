"""Every field of vLLM's requests is part of a prompt, known, or named as ignored when a log holds it."""

from importlib import import_module

import pytest

from kvcache.lab.traces.prompts import ELSEWHERE, KNOWN, PARTS
from kvcache.lab.traces.records import BODIES, TIMES, TOKENS

# They change how a prompt is rendered: reports name them.
IGNORED = {"chat_template", "chat_template_kwargs", "suffix", "reasoning_effort"}
REQUESTS = {
    "openai.chat_completion": "ChatCompletionRequest",
    "openai.completion": "CompletionRequest",
    "openai.responses": "ResponsesRequest",
    "anthropic": "AnthropicMessagesRequest",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_fields_of_requests_are_listed(name):
    protocol = import_module(f"vllm.entrypoints.{name}.protocol")
    fields = set(getattr(protocol, REQUESTS[name]).model_fields)
    assert fields - KNOWN - {*PARTS, *ELSEWHERE, *BODIES, *TIMES, *TOKENS} <= IGNORED
