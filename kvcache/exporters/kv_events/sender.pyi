import ctypes
from typing import NoReturn, Self, final

from kvcache.exporters.kv_events.batches import BatchLog
from kvcache.exporters.kv_events.queue import EventQueue

@final
class Reply:
    @property
    def num_messages(self) -> int: ...
    def __new__(cls, client: bytes, start_seq: int | None = None, has_keys: bool = True) -> Self: ...
    def __reduce__(self) -> NoReturn: ...

@final
class BatchSender:
    @property
    def is_stopped(self) -> bool: ...
    def __new__(
        cls,
        log: BatchLog,
        queue: EventQueue,
        library: ctypes.CDLL,
        pub: int,
        router: int,
        topic: bytes,
        digest_topic: bytes,
        digest_every: int,
        block_size: int,
        epoch: int,
    ) -> Self: ...
    def __reduce__(self) -> NoReturn: ...
    def stop(self) -> None: ...
    def run(self, owes: bool = False) -> bool: ...
    def go_on(self, reply: Reply) -> bool: ...
