"""KV events for routers: the blocks of a cache, published in vLLM's wire format, with digests to verify a view.

A router that places requests by prefix keeps a view of every engine's blocks. Messages get lost, so a view drifts. A
digest every few batches shows whether the view is right, and a snapshot repairs it.

``docs/howto/routers.md`` describes the wire format. It is that of vLLM's ``vllm.distributed.kv_events`` with two
additions: digest messages, and requests for a snapshot or a digest on the replay endpoint.
"""

from kvcache.exporters.kv_events.publisher import KVEventPublisher
from kvcache.exporters.kv_events.subscriber import KVEventSubscriber
from kvcache.exporters.kv_events.view import BlockView, block_value
from kvcache.exporters.kv_events.wire import (
    DIGEST_PREFIX,
    DIGEST_REQUEST,
    END_OF_REPLAY,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    EventBatch,
)

__all__ = [
    "DIGEST_PREFIX",
    "DIGEST_REQUEST",
    "END_OF_REPLAY",
    "SNAPSHOT_REQUEST",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "BlockView",
    "Digest",
    "EventBatch",
    "KVEventPublisher",
    "KVEventSubscriber",
    "block_value",
]
