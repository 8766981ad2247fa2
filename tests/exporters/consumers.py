"""What routers take from KV events, written in Python from the facts of their sources.

| reader | repository | commit | files |
|---|---|---|---|
| llm-d | llm-d/llm-d-router | 0557f29 (pool, events), 1c5d598 (vllm_msgpack), 0539d49 (zmq_subscriber) | pkg/kvevents |
| Dynamo | ai-dynamo/dynamo | 2bd0a36 (convert, types), 17b173e (filter), 035d726 (mod) | lib/kv-router/src/zmq_wire |
| AIBrix, maps | vllm-project/aibrix | 059fe5e | pkg/cache/kvcache/msgpack_decoder.go |
| AIBrix, arrays | vllm-project/aibrix | e3e10f9 | pkg/cache/kvcache/msgpack_decoder.go |
| vllm-router | the binary of 0.1.17 | - | vLLM's fields; unknown ones are errors |

Each reader decodes a payload as msgpack alone, as a program in another language does. `feed` returns a verdict for each
event: "taken", or why the event is dropped; ValueError means that the whole batch is refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import msgspec

MAIN_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
    "lookahead_token_ids",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
TAKEN = "taken"


def fields_of(event: Any, maps: bool = True, arrays: bool = True) -> tuple[str, dict[str, Any]]:
    """Return type and fields of an event in either encoding; ValueError where the reader knows another one only."""
    if isinstance(event, dict) and maps:
        return event["type"], {name: value for name, value in event.items() if name != "type"}
    if isinstance(event, list) and arrays:
        names = FIELDS.get(event[0])
        if names is None:
            raise ValueError(f"unknown event {event[0]!r}")
        return event[0], dict(zip(names, event[1:], strict=False))
    raise ValueError(f"an event of the type {type(event).__name__}")


def check(event: dict[str, Any], name: str, *types: type) -> Any:
    if not isinstance(event.get(name), types):
        raise ValueError(f"{name} is {event.get(name)!r:.60}")
    return event[name]


class Reader:
    """The blocks that a reader knows, by medium, and its verdicts."""

    topic_filter = b""
    maps = arrays = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[str, set[int]] = {}
        self.verdicts: Counter[tuple[str, str]] = Counter()

    def feed(self, topic: bytes, payload: bytes) -> list[str]:
        if not topic.startswith(self.topic_filter):
            return []
        ts, events, *rest = msgspec.msgpack.decode(payload)
        if not isinstance(ts, float) or not isinstance(events, list) or len(rest) > 1:
            raise ValueError(f"a batch must be [float, list, rank], got {payload[:60]!r}")
        verdicts = []
        for kind, event in [fields_of(event, self.maps, self.arrays) for event in events]:
            verdict = TAKEN
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind in FIELDS:
                verdict = self.change(kind, event)
            else:
                raise ValueError(f"unknown event {kind!r}")
            self.verdicts[kind, verdict] += len(event.get("block_hashes", ()))
            verdicts.append(verdict)
        return verdicts

    def change(self, kind: str, event: dict[str, Any]) -> str:
        """Add or remove the blocks of an event, and return the verdict."""
        hashes = [self.hash_of(one) for one in check(event, "block_hashes", list)]
        if reason := self.refusal(kind, event, hashes):
            return reason
        held = self.blocks.setdefault(self.place_of(event), set())
        (held.update if kind == "BlockStored" else held.difference_update)(hashes)
        return TAKEN

    def refusal(self, kind: str, event: dict[str, Any], hashes: list[int]) -> str:
        """Return why an event is dropped, or ""; `hashes` may be cut to those that are taken."""
        raise NotImplementedError

    def place_of(self, event: dict[str, Any]) -> str:
        return str(event["medium"])

    def of_bytes(self, value: bytes) -> int:
        raise ValueError(f"a hash must be a 64-bit integer, got {value!r:.60}")

    def hash_of(self, value: Any) -> int:
        if isinstance(value, bytes):
            return self.of_bytes(value)
        if type(value) is not int or not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"a hash must be a 64-bit integer, got {value!r:.60}")
        return value % (1 << 64)

    def tokens(self, event: dict[str, Any]) -> list[int]:
        found: list[int] = check(event, "token_ids", list)
        if any(type(one) is not int or not 0 <= one < 1 << 32 for one in found):
            raise ValueError(f"token_ids is {found!r:.60}")
        return found


class LLMD(Reader):
    """The vLLM adapter, the pool and the index of llm-d."""

    topic_filter = b"kv@"

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.groups: dict[int, str] = {}

    def feed(self, topic: bytes, payload: bytes) -> list[str]:
        if topic.startswith(self.topic_filter) and topic.count(b"@") != 2:
            raise ValueError(f"a topic must be kv@POD@MODEL, got {topic!r}")
        return super().feed(topic, payload)

    def of_bytes(self, value: bytes) -> int:
        return int.from_bytes(value[-8:], "big") if 0 < len(value) <= 64 else super().of_bytes(value)

    def place_of(self, event: dict[str, Any]) -> str:
        return (check(event, "medium", str, type(None)) or "gpu").lower()

    def refusal(self, kind: str, event: dict[str, Any], hashes: list[int]) -> str:
        group = event.get("group_idx")
        if kind == "BlockRemoved":
            if group is None or self.groups.get(group) in MAIN_KINDS:
                return ""
            return "unsupported_cache_kind" if group in self.groups else "unknown_group"
        tokens, size, known = self.tokens(event), check(event, "block_size", int), set().union(*self.blocks.values())
        check(event, "lora_name", str, type(None))
        if group is not None:
            name = event.get("kv_cache_spec_kind") or ""
            name = self.groups.setdefault(group, name) if name else self.groups.get(group, "")
            if name not in MAIN_KINDS:
                return "unsupported_cache_kind"
            if tokens and size <= 0:
                return "invalid_block_size"
            if tokens and len(tokens) != size * len(hashes):
                return "non_dense_block_span"
        parent = event.get("parent_block_hash")
        if parent is not None and self.hash_of(parent) not in known:
            return "unknown parent"
        if len(tokens) < self.block_size:
            hashes[:] = [one for one in hashes if one in known]
            if tokens or not hashes:
                return "no tokens, and an unknown block"
        return ""


class Dynamo(Reader):
    """Dynamo's wire decoder, filter and conversion."""

    TIERS: ClassVar = {"GPU": "Device", "CPU": "HostPinned", "STORAGE": "Disk", "DISK": "Disk"}

    def place_of(self, event: dict[str, Any]) -> str:
        return str(self.TIERS[event["medium"]])

    def refusal(self, kind: str, event: dict[str, Any], hashes: list[int]) -> str:
        is_store, spec_kind, medium = kind == "BlockStored", event.get("kv_cache_spec_kind"), event.get("medium")
        tokens, size = (self.tokens(event), check(event, "block_size", int)) if is_store else ([], 0)
        if spec_kind is not None and spec_kind not in MAIN_KINDS:
            return "non_main_attention_kind"
        if spec_kind is None and event.get("group_idx"):
            return "unlearned_group_idx"
        if event.get("locality") not in (None, "LOCAL"):
            return "not LOCAL"
        if medium not in (None, *self.TIERS):
            return "unknown medium"
        parent = event.get("parent_block_hash")
        chain = hashes if parent is None else [self.hash_of(parent), *hashes]
        if is_store and len(set(chain)) < len(chain):
            return "a hash comes twice"
        if is_store and size != self.block_size:
            return "another block size"
        return "too few tokens" if len(tokens) < size * len(hashes) else ""


class AIBrix(Reader):
    """AIBrix' decoder: it indexes tokens, so a store without tokens adds no block."""

    def of_bytes(self, value: bytes) -> int:
        return int.from_bytes(value[:8], "big")

    def refusal(self, kind: str, event: dict[str, Any], hashes: list[int]) -> str:
        if kind == "BlockRemoved":
            return ""
        tokens, size = self.tokens(event), check(event, "block_size", int)
        for name, kinds in (("lora_id", int), ("medium", str), ("lora_name", str), ("locality", str)):
            check({name: None, **event}, name, kinds, type(None))
        if tokens and (size <= 0 or len(tokens) % size):
            raise ValueError(f"{len(tokens)} tokens are not divisible by the block size {size}")
        return "" if tokens else "no tokens"


class AIBrixArrays(AIBrix):
    """AIBrix before it read maps."""

    maps = False


class VLLMRouter(Reader):
    """vllm-router: vLLM's fields, and an error at any other."""

    arrays = False

    def of_bytes(self, value: bytes) -> int:
        return int.from_bytes(value[-8:], "big")

    def refusal(self, kind: str, event: dict[str, Any], hashes: list[int]) -> str:
        if unknown := event.keys() - set(FIELDS[kind]):
            raise ValueError(f"unknown fields {sorted(unknown)}")
        if kind == "BlockStored":
            self.tokens(event)
        return ""


READERS = {
    "llm-d": LLMD, "Dynamo": Dynamo, "AIBrix": AIBrix, "AIBrix (arrays only)": AIBrixArrays, "vllm-router": VLLMRouter,
}  # fmt: skip
