"""BatchLog: numbered batches of events, the latest of which are kept for replays, and what is held after them.

Compiled, and without the GIL, because it does all the work of a key that the scheduler leaves to the publishing thread.
"""

cimport cython
from cpython.pythread cimport (
    WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_release_lock,
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from kvcache.exporters.kv_events.atomic cimport load_int, store_int
from kvcache.exporters.kv_events.block_set cimport BlockSet, Key, group_of, hash_bytes
from kvcache.exporters.kv_events.encoding cimport (
    Buffer, MediumDigest, encode_event, finish_batch, start_batch,
)
from kvcache.exporters.kv_events.queue cimport CLEARED, CPU, NUM_MEDIA, REMOVED, STORAGE, STORED, EventKind, Medium

cdef enum:
    MAX_BATCH_EVENTS = 64
    MAX_BATCH_KEYS = 1024           # 40 KB of usual keys; an event that has more goes on in the next batch
    MAX_BATCH_BYTES = 1 << 22
    MAX_KEPT_BYTES = 1 << 28
    KEYS_AT_ONCE = 4096             # made into Python objects between two chances for other threads to run


@cython.final
cdef class BatchLog:
    """BatchLog(queue, max_kept, rank)

    Batches of a queue's events, numbered from 0 on.

    Parameters
    ----------
    queue : EventQueue
        Where the events come from.
    max_kept : int
        Batches that are kept for replay, of 256 MiB at most.
    rank : int
        Data-parallel rank of the engine, in every batch.

    Attributes
    ----------
    num_batches : int
        Batches so far: the number of the next one.
    """

    def __cinit__(self, EventQueue queue not None, Py_ssize_t max_kept, uint64_t rank):
        if max_kept < 1:
            raise ValueError(f"max_kept must be >= 1, got {max_kept}")
        self.queue = queue
        self.cpu, self.storage = BlockSet(), BlockSet()
        self.max_kept, self.rank = max_kept, rank
        self.lock = PyThread_allocate_lock()
        self.kept = <Payload*> calloc(max_kept, sizeof(Payload))
        self.keys = <Key*> malloc(MAX_BATCH_KEYS * sizeof(Key))
        self.found = <int32_t*> malloc(MAX_BATCH_KEYS * sizeof(int32_t))
        if self.lock == NULL or self.kept == NULL or self.keys == NULL or self.found == NULL:
            raise MemoryError(f"no memory for {max_kept} batches")

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.kept != NULL:
            for i in range(self.max_kept):
                free(self.kept[i].data)
        free(self.kept)
        free(self.keys)
        free(self.found)
        free(self.events.data)
        free(self.part.data)
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    def __reduce__(self):
        raise TypeError("a log of batches belongs to one publisher and cannot be pickled")

    @property
    def num_batches(self):
        return load_int(&self.num_made)

    def snapshot(self):
        """Return the number of the next batch, and what was held when it was taken: medium to (hash, group) pairs."""
        cdef HeldKeys held
        cdef Py_ssize_t i
        cdef int outcome, medium
        with nogil:
            outcome = self.copy_held(&held)
        if outcome < 0:
            raise MemoryError("no memory for a snapshot")
        media = {}
        try:
            for medium in range(<int> NUM_MEDIA):
                found = []
                for i in range(held.num_keys[medium]):
                    found.append((hash_bytes(&held.keys[medium][i]), group_of(&held.keys[medium][i])))
                    if i % KEYS_AT_ONCE == KEYS_AT_ONCE - 1:
                        with nogil:
                            pass
                if found:
                    media["CPU" if medium == CPU else "STORAGE"] = frozenset(found)
        finally:
            for medium in range(<int> NUM_MEDIA):
                free(held.keys[medium])
        return held.seq, media

    cdef int make_batch(self) noexcept nogil:
        """Encode, number and keep the next batch; 0: no event waits, 1: done, -1: no memory. For one thread."""
        cdef int outcome
        PyThread_acquire_lock(self.lock, WAIT_LOCK)
        outcome = self._fill()
        PyThread_release_lock(self.lock)
        return outcome

    cdef uint64_t oldest_kept(self) noexcept nogil:
        """Return the number of the oldest batch that is kept."""
        return self.first_kept

    cdef const Payload* payload_of(self, uint64_t seq) noexcept nogil:
        """Return a batch that is kept; for the thread that makes them."""
        return &self.kept[seq % <uint64_t> self.max_kept]

    cdef void digests(self, MediumDigest* digests) noexcept nogil:
        """Write what is held now."""
        digests[<int> CPU] = MediumDigest(self.cpu.num_blocks, self.cpu.sum)
        digests[<int> STORAGE] = MediumDigest(self.storage.num_blocks, self.storage.sum)

    cdef int copy_held(self, HeldKeys* held) noexcept nogil:
        """Copy what is held now, from any thread; -1: no memory."""
        cdef bint is_whole
        PyThread_acquire_lock(self.lock, WAIT_LOCK)
        held.seq = self.num_made
        self.digests(held.digests)
        held.num_keys[<int> CPU], held.num_keys[<int> STORAGE] = self.cpu.num_blocks, self.storage.num_blocks
        held.keys[<int> CPU], held.keys[<int> STORAGE] = self.cpu.copy_keys(), self.storage.copy_keys()
        PyThread_release_lock(self.lock)
        is_whole = held.keys[<int> CPU] != NULL and held.keys[<int> STORAGE] != NULL
        if not is_whole:
            free(held.keys[<int> CPU])
            free(held.keys[<int> STORAGE])
        return 0 if is_whole else -1

    cdef int encode_part(self, int medium, uint64_t block_size, const Key* keys, Py_ssize_t n) noexcept nogil:
        """Encode a batch of stored keys into `part`, which has no number and is not kept; -1: no memory."""
        cdef Py_ssize_t num_events
        if start_batch(&self.part) < 0:
            return -1
        num_events = encode_event(&self.part, STORED, <Medium> medium, block_size, keys, n)
        return -1 if num_events < 0 else self._finish(&self.part, num_events)

    cdef int _fill(self) noexcept nogil:
        cdef Py_ssize_t num_taken = 0, num_events = 0, num_made, n
        cdef Py_ssize_t num_keys_left = MAX_BATCH_KEYS
        cdef Buffer* events = &self.events
        cdef EventKind kind
        cdef Payload* payload
        cdef uint8_t* data
        if start_batch(events) < 0:
            return -1
        while num_taken < MAX_BATCH_EVENTS and num_keys_left > 0 and events.size < MAX_BATCH_BYTES:
            if self.queue.num_keys_left == 0 and not self.queue.next_event():
                break
            num_taken += 1
            if self.queue.event.by_hash:
                if self.queue.event.medium == CPU:
                    n = self._remove_hashes(self.cpu, num_keys_left, &num_made)
                else:
                    n = self._remove_hashes(self.storage, num_keys_left, &num_made)
                if num_made < 0:
                    return -1
                num_keys_left -= n
                num_events += num_made
                continue
            kind = <EventKind> self.queue.event.kind
            n = self.queue.next_keys(self.keys, num_keys_left, MAX_BATCH_BYTES)
            num_keys_left -= n
            num_made = encode_event(
                events, kind, <Medium> self.queue.event.medium, self.queue.event.block_size, self.keys, n)
            if num_made < 0:
                return -1
            num_events += num_made
            if kind == CLEARED:
                self.cpu.empty()
                self.storage.empty()
            elif self.queue.event.medium == CPU:
                if self.cpu.change(self.keys, n, kind == REMOVED) < 0:
                    return -1
            elif self.storage.change(self.keys, n, kind == REMOVED) < 0:
                return -1
        if num_events == 0:
            return 1 if num_taken else 0
        if self._finish(events, num_events) < 0:
            return -1
        data = <uint8_t*> malloc(events.size)
        if data == NULL:
            return -1
        payload = &self.kept[self.num_made % self.max_kept]
        self._drop(payload)
        payload.data, payload.size = data, events.size - events.start
        self.num_kept_bytes += payload.size
        self.first_kept = max(self.first_kept, self.num_made + 1 - <int64_t> self.max_kept)
        while self.num_kept_bytes > MAX_KEPT_BYTES and self.first_kept < self.num_made:
            self._drop(&self.kept[self.first_kept % self.max_kept])
            self.first_kept += 1
        memcpy(data, events.data + events.start, payload.size)
        store_int(&self.num_made, self.num_made + 1)
        return 1

    cdef Py_ssize_t _remove_hashes(
        self, BlockSet held, Py_ssize_t max_keys, Py_ssize_t* num_events,
    ) noexcept nogil:
        """Encode blocks of this event that leave, and take them out; return how many hashes were read.

        `num_events`: how many events they made, or -1 where there is no memory.
        """
        cdef Py_ssize_t n = min(max_keys, <Py_ssize_t> self.queue.num_keys_left), num_found
        n = held.find_hashes(self.queue.hashes_left(), n, MAX_BATCH_BYTES, self.found, self.keys, &num_found)
        num_events[0] = encode_event(
            &self.events, REMOVED, <Medium> self.queue.event.medium, self.queue.event.block_size, self.keys, num_found)
        held.drop_found(self.found, num_found)
        self.queue.skip_hashes(n)
        return n

    cdef void _drop(self, Payload* payload) noexcept nogil:
        self.num_kept_bytes -= payload.size
        free(payload.data)
        payload.data, payload.size = NULL, 0

    cdef int _finish(self, Buffer* batch, Py_ssize_t num_events) noexcept nogil:
        cdef timespec now
        clock_gettime(CLOCK_REALTIME, &now)
        # Never back, so that a subscriber can tell a new publisher's low numbers from messages that it had already.
        self.last_ts = max(self.last_ts, now.tv_sec + now.tv_nsec * 1e-9)
        return finish_batch(batch, self.last_ts, num_events, self.rank)
