"""An engine for tests of managers: it serves requests; blocks are filled by key, and compared with it when loaded."""

import numpy as np

from kvcache.request import ReqContext


class Engine:
    """The calls of a scheduler to `manager`, and the bytes of its blocks in `host`; None moves no bytes."""

    def __init__(self, manager, host=None):
        self.manager, self.host = manager, host

    def content(self, key):
        """Return the bytes of a key's block."""
        return np.frombuffer(key.ljust(self.host.shape[1]), np.uint8)

    def wait(self):
        """Let time pass while a look-up waits."""
        self.manager.on_schedule_end()

    def find(self, keys, context):
        """Look keys up until the manager answers; return the hits."""
        while (num_hits := self.manager.lookup(keys, context)) is None:
            self.wait()
        return num_hits

    def check_bytes(self, keys, block_ids):
        for key, block_id in zip(keys, block_ids, strict=True):
            assert np.array_equal(self.host[block_id], self.content(key)), f"wrong bytes of {key!r}"

    def fill(self, keys, block_ids):
        for key, block_id in zip(keys, block_ids, strict=True):
            self.host[block_id] = self.content(key)

    def load(self, keys, context=None):
        """Load blocks that are ready."""
        spec = self.manager.prepare_load(keys, context)
        if self.host is not None:
            self.check_bytes(keys, spec.block_ids.tolist())
        self.manager.complete_load(keys, context)

    def store(self, keys, context=None, success=True):
        """Store the blocks that the manager takes; return its answer."""
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            if self.host is not None:
                self.fill(output.keys_to_store, output.store_spec.block_ids.tolist())
            self.manager.complete_store(output.keys_to_store, context, success)
        return output

    def serve(self, keys, context=None):
        """Load what is found, store the rest, and end the request and the step; return the hits."""
        context = context or ReqContext()
        num_hits = self.find(keys, context)
        self.load(keys[:num_hits], context)
        self.store(keys[num_hits:], context)
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end()
        return num_hits
