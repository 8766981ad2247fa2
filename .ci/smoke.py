"""Import the installed package with numpy alone, then store, evict and load blocks under every policy."""

import sys

import kvcache
from kvcache import CPUOffloadingManager, ReqContext
from kvcache.registry import POLICIES

for policy in POLICIES.names():
    manager = CPUOffloadingManager(block_size=16, num_blocks=64, cache_policy=policy)
    for number in range(200):
        keys = [b"system"] + [b"%d/%d" % (number // 2, i) for i in range(8)]
        request = ReqContext()
        hits = manager.lookup(keys, request)
        manager.touch(keys, request)
        manager.prepare_load(keys[:hits], request)
        manager.complete_load(keys[:hits], request)
        output = manager.prepare_store(keys, request)
        manager.complete_store([] if output is None else output.keys_to_store, request)
        manager.on_request_finished(request)
    stats = manager.stats()
    if not (stats.hit_blocks and stats.evicted_blocks):
        sys.exit(f"error: {policy} hit {stats.hit_blocks} and evicted {stats.evicted_blocks} blocks")
if "torch" in sys.modules:
    sys.exit("error: import kvcache imported torch")
print(f"kvcache {kvcache.__version__} on {sys.version.split()[0]}: {', '.join(POLICIES.names())}")
