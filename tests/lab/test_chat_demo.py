"""`kvcache chat-demo`: exact token counts, a plot, and an error if tokens differ."""

import json

import matplotlib
import pytest
import torch
import transformers
import typer

from kvcache.integrations.transformers import PrefixCache
from kvcache.integrations.transformers.layout import KVLayout

pytestmark = pytest.mark.slow

SMALL = ["--users", "2", "--turns", "2", "--answer-tokens", "4"]
NEEDED = (matplotlib, transformers, typer)


@pytest.fixture(autouse=True)
def same_threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_demo_counts_tokens_and_plots(run, tmp_path):
    plot, document_path = tmp_path / "chat.png", tmp_path / "chat.json"
    status, out, _ = run("chat-demo", *SMALL, "--plot", plot, "--json", document_path)
    assert status == 0
    assert "Turn 1 hits what all chats share" in " ".join(out.split())
    assert out.splitlines()[-1] == "All tokens are equal without and with the cache."
    assert plot.read_bytes().startswith(b"\x89PNG")
    document = json.loads(document_path.read_text())
    # First turns: 288 tokens; the second user hits the system prompt's 192 tokens. Second turns: 388 tokens; of the 291
    # with keys and values, 18 blocks are whole. The last block of a hit is computed again.
    first, second = document["turns"]
    assert (first["prompt_tokens"], first["computed_tokens"]) == (576, 288 + 112)
    assert (second["prompt_tokens"], second["computed_tokens"]) == (776, 116 + 116)
    assert (document["prompt_tokens"], document["computed_tokens"]) == (1352, 632)
    assert document["hit_rate"] == 1 - 632 / 1352
    assert document["tokens_equal"] is True


def test_other_tokens_end_it(run, monkeypatch):
    load = PrefixCache._load

    def flipped(self, rows, requests):
        hit = load(self, rows, requests)
        for layer in hit.past.layers[: len(hit.past.layers) if hit.start else 0]:
            layer.keys = -layer.keys
        return hit

    monkeypatch.setattr(KVLayout, "agrees", lambda self, hit: True)
    monkeypatch.setattr(PrefixCache, "_load", flipped)
    status, _, err = run("chat-demo", *SMALL)
    assert status == 1
    assert "kvcache: error: user 1 got other tokens with the cache in turn 1" in err
