"""EventQueue: events on their way from the scheduler to the publishing thread, as plain bytes.

Compiled because the scheduler copies every key of every event here, in the operation that makes it where the publisher
follows a manager. It pays some 5 ns a key, so that the other thread needs no Python object: it never takes the GIL, and
no cache line of the engine's keys. There is no lock, either, that a thread without a processor could hold: one thread
writes, one reads, and both say how far they have come.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from kvcache.core.event_log cimport Event, EventSink, TakenEvents
from kvcache.core.index cimport prefetch
from kvcache.exporters.kv_events.atomic cimport add_int, load_int, load_size, store_int, store_size
from kvcache.exporters.kv_events.block_set cimport GROUP_BYTES, Key

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject* key) noexcept
    bint PyBytes_Check(PyObject* key) noexcept
    Py_ssize_t PyBytes_GET_SIZE(PyObject* key) noexcept
    PyObject* PyList_GET_ITEM(object keys, Py_ssize_t i) noexcept
    void Py_SET_SIZE(object keys, Py_ssize_t n) noexcept

cdef extern from *:
    """
    /* Usual keys in two copies of a fixed size, which overlap. */
    static inline void kv_copy_key(uint8_t *to, const char *from, uint32_t size)
    {
        if (size > 64 || size < 16) {
            memcpy(to, from, size);
        } else if (size < 32) {
            memcpy(to, from, 16);
            memcpy(to + size - 16, from + size - 16, 16);
        } else {
            memcpy(to, from, 32);
            memcpy(to + size - 32, from + size - 32, 32);
        }
    }
    #define kv_prefetch_write(at) __builtin_prefetch(at, 1)
    #define kv_take_all(at) __atomic_exchange_n(at, NULL, __ATOMIC_ACQUIRE)
    #define kv_swap_in(at, old, new) \\
        __atomic_compare_exchange_n(at, old, new, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)
    """
    void copy_key "kv_copy_key"(uint8_t* to, const char* start, uint32_t size) noexcept nogil
    void prefetch_write "kv_prefetch_write"(const void* at) noexcept nogil
    Chunk* load_chunk "kv_load"(Chunk** at) noexcept nogil
    void store_chunk "kv_store"(Chunk** at, Chunk* chunk) noexcept nogil
    Chunk* take_chunks "kv_take_all"(Chunk** at) noexcept nogil
    bint swap_chunk "kv_swap_in"(Chunk** at, Chunk** old, Chunk* new) noexcept nogil

cdef enum:
    CHUNK_BYTES = 1 << 16
    AHEAD = 12              # keys fetched ahead of their copying
    LINE_BYTES = 64
    WRITE_AHEAD = 640       # bytes: the other processor read this memory last, and has its lines
    MAX_SPARE = 64          # chunks that are kept for later: 4 MiB; written memory needs no page faults


@cython.final
cdef class EventQueue(EventSink):
    """EventQueue(block_size=0, max_events=100000)

    Events in order, for one thread that puts them in and one that takes them out.

    Parameters
    ----------
    block_size : int
        Tokens of a block, for events that do not say.
    max_events : int
        Events that may wait before `put_taken` refuses more.

    Attributes
    ----------
    block_size : int
        As above.
    last_number : int
        Of the latest event that had one.
    is_merging : bool
        Whether events have to be merged elsewhere, so that they keep their order.
    has_refused : bool
        Whether a log's event has found no room, and waits there.
    """

    def __cinit__(self, block_size=0, int64_t max_events=100_000):
        self.max_events = max_events
        self.default_block_size = checked_size(block_size)
        self.tail = self.head = new_chunk(CHUNK_BYTES)
        if self.tail == NULL:
            raise MemoryError("no memory for a queue of events")

    def __dealloc__(self):
        free_chunks(self.head)
        free_chunks(self.spare)
        free_chunks(self.returned)

    def __reduce__(self):
        raise TypeError("a queue belongs to one publisher and cannot be pickled")

    def __len__(self):
        """Return how many events wait or are being sent."""
        return load_int(&self.num_queued) - load_int(&self.num_sent)

    @property
    def is_merging(self):
        return load_int(&self.merging) != 0

    @is_merging.setter
    def is_merging(self, bint value):
        store_int(&self.merging, value)

    @property
    def has_refused(self):
        return load_int(&self.refused) != 0

    @has_refused.setter
    def has_refused(self, bint value):
        store_int(&self.refused, value)

    @property
    def block_size(self):
        return self.default_block_size

    @block_size.setter
    def block_size(self, value):
        self.default_block_size = checked_size(value)

    @cython.critical_section
    def put_taken(self, TakenEvents events not None):
        """Put in all events that have not been read, which drops them there; all, or none where a key is no bytes.

        Where events before them are missing, what is held is not known: that everything was cleared is put in first.

        Returns
        -------
        bool
            Whether there was room.
        """
        cdef int64_t num_events = events.num_events - events.num_read, num_cleared = 0
        cdef uint64_t number = events.first_number + events.num_read, num_tokens
        cdef Py_ssize_t i
        cdef Event* event
        if num_events == 0:
            return True
        if load_int(&self.merging) or self.num_queued - load_int(&self.num_sent) + num_events > self.max_events:
            return False
        num_tokens = checked_size(events.block_size)
        for i in range(events.num_read, events.num_events):
            if not events.events[i].are_exact:
                self._num_bytes(<list> events.events[i].keys)
        try:
            if self.last_number and number != self.last_number + 1:
                self._put_cleared()
                num_cleared = 1
            for i in range(events.num_read, events.num_events):
                event = &events.events[i]
                if event.are_exact:
                    self._copy(
                        <list> event.keys, event.num_keys, <object> event.medium, event.removed, num_tokens, True)
                else:
                    self._put(<list> event.keys, <object> event.medium, event.removed, num_tokens)
        except BaseException:
            # There is no memory, and some keys have been dropped: the next events find a gap.
            self._roll_back()
            events.drop_unread()
            raise
        self._commit(num_cleared + num_events)
        self.last_number = number + num_events - 1
        events.drop_unread()
        return True

    @cython.critical_section
    def put(self, list keys not None, str medium not None, bint removed, block_size=0):
        """Put in one event, or none where a key is no bytes."""
        self._put(keys, medium, removed, checked_size(block_size))
        self._commit(1)

    @cython.critical_section
    def put_cleared(self):
        """Put in that everything was cleared."""
        self._put_cleared()
        self._commit(1)

    cdef bint put_event(
        self, list keys, Py_ssize_t n, medium, bint removed, bint are_exact, const uint64_t* hashes, uint64_t number,
    ) noexcept:
        cdef int64_t num_events = 1
        if load_int(&self.merging) or self.num_queued - load_int(&self.num_sent) >= self.max_events:
            store_int(&self.refused, 1)
            return False
        if not are_exact and not are_bytes(keys, n):
            # The event is missing, so that the next one finds a gap.
            return True
        try:
            if self.last_number and number != self.last_number + 1:
                self._put_cleared()
                num_events = 2
            if removed and hashes != NULL and not self.has_short:
                # What leaves was put in before: the reader has its bytes, which would have to be fetched here.
                self._put_hashes(hashes, n, medium, self.default_block_size)
            else:
                self._copy(keys, n, medium, removed, self.default_block_size, False)
        except MemoryError:
            return False
        self._commit(num_events)
        self.last_number = number
        return True

    cdef bint put_reset(self) noexcept:
        if load_int(&self.merging):
            return False
        try:
            self._put_cleared()
        except MemoryError:
            return False
        self._commit(1)
        return True

    cdef int _put_cleared(self) except -1:
        cdef EventHeader event = EventHeader(0, 0, CLEARED, CPU, False)
        self._make_room(sizeof(event))
        memcpy(self.tail.data + self.tail.num_written, &event, sizeof(event))
        self.tail.num_written += sizeof(event)
        return 0

    cdef int _put(self, list keys, medium, bint removed, uint64_t block_size) except -1:
        """Write an event that nobody sees before `_commit`; an error takes all back that has not been committed."""
        cdef Py_ssize_t n = len(keys), i
        cdef uint8_t* at
        self._make_room(self._num_bytes(keys))
        at = self._put_header(n, medium, removed, block_size, False)
        for i in range(n):
            self.has_short |= PyBytes_GET_SIZE(PyList_GET_ITEM(keys, i)) <= GROUP_BYTES
            at = put_key(at, PyList_GET_ITEM(keys, i))
        self.tail.num_written = at - self.tail.data
        return 0

    cdef int _copy(
        self, list keys, Py_ssize_t n, medium, bint removed, uint64_t block_size, bint drops,
    ) except -1:
        """Write an event of the first `n` keys, all bytes, as `_put` does.

        `drops`: the list loses them on the way, so that each is fetched once, and then gone.
        """
        cdef Py_ssize_t i = 0
        cdef size_t size, room
        cdef PyObject* key
        cdef uint8_t* at
        self._check_key(PyList_GET_ITEM(keys, 0))
        # Most keys are as long as the first.
        room = n * key_room(PyList_GET_ITEM(keys, 0))
        self._make_room(sizeof(EventHeader) + room)
        at = self._put_header(n, medium, removed, block_size, False)
        if drops:
            Py_SET_SIZE(keys, 0)    # the collector finds none meanwhile
        while i < n:
            if i + AHEAD < n:
                key = PyList_GET_ITEM(keys, i + AHEAD)
                prefetch(key)
                prefetch(<char*> key + LINE_BYTES)
            key = PyList_GET_ITEM(keys, i)
            size = key_room(key)
            if size > room:
                self.tail.num_written = at - self.tail.data
                room = (n - i) * size
                try:
                    self._check_key(key)
                    self._make_room(room)
                except BaseException:
                    while drops and i < n:
                        Py_DECREF(<object> PyList_GET_ITEM(keys, i))
                        i += 1
                    raise
                at = self.tail.data + self.tail.num_written
            room -= size
            prefetch_write(at + WRITE_AHEAD)
            self.has_short |= PyBytes_GET_SIZE(key) <= GROUP_BYTES
            at = put_key(at, key)
            if drops:
                Py_DECREF(<object> key)
            i += 1
        self.tail.num_written = at - self.tail.data
        return 0

    cdef int _put_hashes(self, const uint64_t* hashes, Py_ssize_t n, medium, uint64_t block_size) except -1:
        """Write an event of blocks that left, by their hashes."""
        cdef uint8_t* at
        self._make_room(sizeof(EventHeader) + n * sizeof(uint64_t))
        at = self._put_header(n, medium, True, block_size, True)
        memcpy(at, hashes, n * sizeof(uint64_t))
        self.tail.num_written = at - self.tail.data + n * sizeof(uint64_t)
        return 0

    cdef uint8_t* _put_header(
        self, Py_ssize_t num_keys, medium, bint removed, uint64_t block_size, bint by_hash,
    ) noexcept:
        """Write the header of an event there is room for; return where its keys begin."""
        cdef EventHeader event = EventHeader(
            block_size or self.default_block_size, <uint32_t> num_keys, REMOVED if removed else STORED,
            CPU if medium == "CPU" else STORAGE, by_hash)
        cdef uint8_t* at = self.tail.data + self.tail.num_written
        memcpy(at, &event, sizeof(event))
        return at + sizeof(event)

    cdef size_t _num_bytes(self, list keys) except 0:
        """Return what an event of these keys takes, or raise ValueError where one is no bytes."""
        cdef size_t num_bytes = sizeof(EventHeader)
        cdef Py_ssize_t n = len(keys), i
        if n > UINT32_MAX:
            self._roll_back()
            raise ValueError(f"an event may have 2**32-1 keys, got {n}")
        for i in range(n):
            self._check_key(PyList_GET_ITEM(keys, i))
            num_bytes += key_room(PyList_GET_ITEM(keys, i))
        return num_bytes

    cdef int _check_key(self, PyObject* key) except -1:
        if not is_bytes(key):
            # First, because what prints the key may come back here.
            self._roll_back()
            raise ValueError(f"a key must be bytes, fewer than 2**32 of them, got {<object> key!r:.80}")
        return 0

    cdef int _make_room(self, size_t size) except -1:
        """Go on in another chunk where this one is full, with what has been written and is not ready yet."""
        cdef Chunk* last = self.tail
        cdef size_t num_pending = last.num_written - last.num_ready
        cdef Chunk* chunk
        if size <= last.capacity - last.num_written:
            return 0
        if self.spare == NULL:
            self.spare = take_chunks(&self.returned)
            add_int(&self.num_returned, -load_int(&self.num_returned))
        chunk = self.spare
        if chunk != NULL and num_pending + size <= CHUNK_BYTES:
            self.spare = chunk.next
            chunk.next = NULL
        else:
            chunk = new_chunk(max(<size_t> CHUNK_BYTES, 2 * (num_pending + size)))
            if chunk == NULL:
                self._roll_back()
                raise MemoryError(f"no memory for an event of {num_pending + size} bytes")
        memcpy(chunk.data, last.data + last.num_ready, num_pending)
        chunk.num_written = num_pending
        self.tail = chunk
        # The reader leaves a chunk for good once it sees the next one.
        store_chunk(&last.next, chunk)
        return 0

    cdef void _commit(self, int64_t num_events) noexcept:
        # Counted first, so that nobody takes what waits for sent.
        store_int(&self.num_queued, self.num_queued + num_events)
        store_size(&self.tail.num_ready, self.tail.num_written)

    cdef void _roll_back(self) noexcept:
        self.tail.num_written = self.tail.num_ready

    cdef bint next_event(self) noexcept nogil:
        """Go to the next event, if there is one; its header is in `event` then. The last one's keys have been read."""
        cdef Chunk* chunk = self.head
        cdef Chunk* after
        while chunk.num_read == load_size(&chunk.num_ready):
            after = load_chunk(&chunk.next)
            if after == NULL:
                return False
            if chunk.num_read != load_size(&chunk.num_ready):
                break
            self.head = after
            self._give_back(chunk)
            chunk = after
        memcpy(&self.event, chunk.data + chunk.num_read, sizeof(EventHeader))
        chunk.num_read += sizeof(EventHeader)
        self.num_keys_left = self.event.num_keys
        self.num_taken += 1
        return True

    cdef Py_ssize_t next_keys(self, Key* keys, Py_ssize_t n, size_t max_bytes) noexcept nogil:
        """Read up to `n` keys of this event, which lie in the queue until the next event is asked for."""
        cdef Chunk* chunk = self.head
        cdef const uint8_t* start = chunk.data + chunk.num_read
        cdef const uint8_t* at = start
        cdef Py_ssize_t count = 0
        n = min(n, <Py_ssize_t> self.num_keys_left)
        while count < n and <size_t> (at - start) < max_bytes:
            memcpy(&keys[count].size, at, sizeof(uint32_t))
            keys[count].data = at + sizeof(uint32_t)
            at += sizeof(uint32_t) + keys[count].size
            count += 1
        chunk.num_read += at - start
        self.num_keys_left -= <uint32_t> count
        return count

    cdef const uint8_t* hashes_left(self) noexcept nogil:
        """Return where the hashes of this event that were not skipped are: `num_keys_left`, not aligned."""
        return self.head.data + self.head.num_read

    cdef void skip_hashes(self, Py_ssize_t n) noexcept nogil:
        """Leave `n` hashes behind."""
        self.head.num_read += n * sizeof(uint64_t)
        self.num_keys_left -= <uint32_t> n

    cdef void mark_sent(self) noexcept nogil:
        """What has been taken was sent."""
        store_int(&self.num_sent, self.num_taken - (1 if self.num_keys_left else 0))

    cdef void _give_back(self, Chunk* chunk) noexcept nogil:
        cdef Chunk* top
        if chunk.capacity != CHUNK_BYTES or load_int(&self.num_returned) >= MAX_SPARE:
            free(chunk)
            return
        chunk.num_written = chunk.num_ready = chunk.num_read = 0
        add_int(&self.num_returned, 1)
        top = load_chunk(&self.returned)
        chunk.next = top
        while not swap_chunk(&self.returned, &top, chunk):
            chunk.next = top


cdef inline bint is_bytes(PyObject* key) noexcept:
    return PyBytes_Check(key) and PyBytes_GET_SIZE(key) < UINT32_MAX - GROUP_BYTES


cdef bint are_bytes(list keys, Py_ssize_t n) noexcept:
    cdef Py_ssize_t i
    for i in range(n):
        if not is_bytes(PyList_GET_ITEM(keys, i)):
            return False
    return n <= UINT32_MAX


cdef inline size_t key_room(PyObject* key) noexcept:
    # A bare block hash is a key, too, and gets a group.
    return sizeof(uint32_t) + <size_t> PyBytes_GET_SIZE(key) + GROUP_BYTES


cdef inline uint8_t* put_key(uint8_t* at, PyObject* key) noexcept:
    cdef uint32_t size = <uint32_t> PyBytes_GET_SIZE(key)
    copy_key(at + sizeof(uint32_t), PyBytes_AS_STRING(key), size)
    if size <= GROUP_BYTES:
        memset(at + sizeof(uint32_t) + size, 0, GROUP_BYTES)
        size += GROUP_BYTES
    memcpy(at, &size, sizeof(size))
    return at + sizeof(uint32_t) + size


cdef uint64_t checked_size(block_size) except? 0:
    if not isinstance(block_size, int) or not 0 <= block_size < 1 << 64:
        raise ValueError(f"block_size must be an int >= 0, got {block_size!r}")
    return block_size


cdef Chunk* new_chunk(size_t capacity) noexcept nogil:
    cdef Chunk* chunk = <Chunk*> malloc(sizeof(Chunk) + capacity)
    if chunk != NULL:
        chunk.next = NULL
        chunk.capacity = capacity
        chunk.num_written = chunk.num_ready = chunk.num_read = 0
        chunk.data = <uint8_t*> &chunk[1]
    return chunk


cdef void free_chunks(Chunk* chunk) noexcept nogil:
    cdef Chunk* after
    while chunk != NULL:
        after = chunk.next
        free(chunk)
        chunk = after
