"""KV events for routers: the blocks of a cache, published in vLLM's wire format.

A router that places requests by prefix follows every engine's blocks. Messages get lost, so a router asks for the
missing ones by their number. ``docs/howto/routers.md`` describes the wire format, that of vLLM's
``vllm.distributed.kv_events``.
"""

from kvcache.exporters.kv_events.publisher import KVEventPublisher as KVEventPublisher
from kvcache.exporters.kv_events.wire import END_OF_REPLAY as END_OF_REPLAY
from kvcache.exporters.kv_events.wire import AllBlocksCleared as AllBlocksCleared
from kvcache.exporters.kv_events.wire import BlockRemoved as BlockRemoved
from kvcache.exporters.kv_events.wire import BlockStored as BlockStored
from kvcache.exporters.kv_events.wire import EventBatch as EventBatch
