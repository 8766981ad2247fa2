"""KV events for routers: the blocks of a cache, published in vLLM's wire format, with digests to verify a view.

A router that places requests by prefix keeps a view of every engine's blocks. Messages get lost, so a view drifts. A
digest every few batches shows whether the view is right, and a snapshot repairs it.

``docs/howto/routers.md`` describes the wire format. It is that of vLLM's ``vllm.distributed.kv_events`` with two
additions: digest messages, and requests for a snapshot or a digest on the replay endpoint.
"""

from kvcache.exporters.kv_events.publisher import KVEventPublisher as KVEventPublisher
from kvcache.exporters.kv_events.subscriber import KVEventSubscriber as KVEventSubscriber
from kvcache.exporters.kv_events.view import BlockView as BlockView
from kvcache.exporters.kv_events.view import block_value as block_value
from kvcache.exporters.kv_events.wire import DIGEST_PREFIX as DIGEST_PREFIX
from kvcache.exporters.kv_events.wire import DIGEST_REQUEST as DIGEST_REQUEST
from kvcache.exporters.kv_events.wire import END_OF_REPLAY as END_OF_REPLAY
from kvcache.exporters.kv_events.wire import SNAPSHOT_REQUEST as SNAPSHOT_REQUEST
from kvcache.exporters.kv_events.wire import AllBlocksCleared as AllBlocksCleared
from kvcache.exporters.kv_events.wire import BlockRemoved as BlockRemoved
from kvcache.exporters.kv_events.wire import BlockStored as BlockStored
from kvcache.exporters.kv_events.wire import Digest as Digest
from kvcache.exporters.kv_events.wire import EventBatch as EventBatch
