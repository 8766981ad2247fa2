"""BatchSender: the publishing thread's loop: wait, make batches, send them, until something needs Python.

Compiled because the loop runs without the GIL, which a scheduler's thread would have to hand over for every frame sent
through Python. It calls libzmq's own functions, whose addresses pyzmq's library gives.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from kvcache.exporters.kv_events.atomic cimport load_int, store_int
from kvcache.exporters.kv_events.batches cimport BatchLog, HeldKeys, Payload
from kvcache.exporters.kv_events.encoding cimport MAX_CONTROL_BYTES, MediumDigest, encode_digest, put_seq
from kvcache.exporters.kv_events.queue cimport CPU, NUM_MEDIA, STORAGE, EventQueue

import ctypes

ctypedef struct PollItem:       # zmq_pollitem_t
    void* socket
    int fd
    short events
    short revents

ctypedef int (*SendFunction)(void* socket, const void* data, size_t size, int flags) noexcept nogil
ctypedef int (*PollFunction)(PollItem* items, int num_items, long timeout_ms) noexcept nogil
ctypedef int (*ErrorFunction)() noexcept nogil

cdef enum:
    POLL_IN = 1
    SEND_MORE = 2
    SEQ_BYTES = 8
    LEAST_WAIT_MS = 4       # each wake-up may take the scheduler's processor, and always takes some of its caches
    MAX_WAIT_MS = 16        # when there is nothing to send; what is queued waits as long at most
    SNAPSHOT_KEYS = 4096    # in a message
    MAX_REPLIES = 256       # messages to one client before batches are sent again
    OUT_OF_MEMORY = -2
    TAKES_NO_MORE = 1

cdef uint64_t END_OF_REPLAY = <uint64_t> -1

# One part of a message.
cdef struct Frame:
    const void* data
    size_t size


@cython.final
cdef class Reply:
    """Reply(client, start_seq=None, has_keys=True)

    What a client asked for and has not been sent yet: every batch that is kept from a number on, a snapshot, or the
    digest of one.

    Parameters
    ----------
    client : bytes
        The router's name for it.
    start_seq : int, optional
        Number of the first batch; left out: a snapshot.
    has_keys : bool
        Whether a snapshot's blocks are sent before its digest.

    Attributes
    ----------
    num_messages : int
        Messages that were sent.
    """

    cdef bytes client               # keeps the frame
    cdef Frame to
    cdef readonly uint64_t num_messages
    cdef bint is_snapshot
    cdef bint has_keys
    cdef uint64_t next_seq          # of a replay
    cdef HeldKeys held              # of a snapshot that has begun
    cdef bint has_begun
    cdef int medium
    cdef Py_ssize_t next_key

    def __cinit__(self, bytes client not None, start_seq=None, bint has_keys=True):
        self.client, self.to = client, frame_of(client)
        self.is_snapshot, self.has_keys = start_seq is None, has_keys
        self.next_seq = 0 if start_seq is None else start_seq

    def __dealloc__(self):
        cdef int medium
        for medium in range(<int> NUM_MEDIA):
            free(self.held.keys[medium])

    def __reduce__(self):
        raise TypeError("a reply belongs to one client and cannot be pickled")


@cython.final
cdef class BatchSender:
    """BatchSender(log, queue, library, pub, router, topic, digest_topic, digest_every, block_size, epoch)

    Sends a log's batches and digests, and answers requests for what was missed.

    Parameters
    ----------
    log : BatchLog
        What is sent.
    queue : EventQueue
        What the log takes events from.
    library : ctypes.CDLL
        Gives libzmq's functions.
    pub, router : int
        Addresses of libzmq's sockets; 0: no router. They are used by `run` and the replies alone.
    topic, digest_topic : bytes
        First frames.
    digest_every : int
        Batches between two digests; 0: none.
    block_size : int
        Tokens of a block, in snapshots.
    epoch : int
        Tells this publisher from those before it at the same endpoint, in every digest.

    Attributes
    ----------
    is_stopped : bool
        Whether `stop` was called.
    """

    cdef BatchLog log
    cdef EventQueue queue
    cdef object library             # keeps the functions
    cdef SendFunction send
    cdef PollFunction poll
    cdef ErrorFunction error
    cdef void* pub
    cdef void* router
    cdef int last_error
    cdef bytes topic                # keeps the frame
    cdef bytes digest_topic
    cdef Frame topic_frame
    cdef Frame digest_topic_frame
    cdef uint64_t digest_every
    cdef uint64_t block_size
    cdef uint64_t epoch
    cdef uint64_t num_sent
    cdef int64_t stopped

    def __cinit__(
        self, BatchLog log not None, EventQueue queue not None, library, uintptr_t pub, uintptr_t router,
        bytes topic not None, bytes digest_topic not None, uint64_t digest_every, uint64_t block_size,
        uint64_t epoch,
    ):
        self.log, self.queue, self.library = log, queue, library
        self.send = <SendFunction> <uintptr_t> address_of(library, "zmq_send")
        self.poll = <PollFunction> <uintptr_t> address_of(library, "zmq_poll")
        self.error = <ErrorFunction> <uintptr_t> address_of(library, "zmq_errno")
        self.pub, self.router = <void*> pub, <void*> router
        self.topic, self.digest_topic = topic, digest_topic
        self.topic_frame, self.digest_topic_frame = frame_of(topic), frame_of(digest_topic)
        self.digest_every, self.block_size, self.epoch = digest_every, block_size, epoch

    def __reduce__(self):
        raise TypeError("a sender belongs to one publisher and cannot be pickled")

    @property
    def is_stopped(self):
        return load_int(&self.stopped) != 0

    def stop(self):
        """Let `run` send what is queued, and return."""
        store_int(&self.stopped, 1)

    def run(self, bint owes=False):
        """Send batches until Python is needed, or for a moment where replies are owed; for one thread.

        Returns
        -------
        bool
            Whether requests wait at the router. That the queue's events are merged or wait in a log, and that the
            sender was stopped, are other reasons to return.

        Raises
        ------
        OSError
            libzmq's; nothing more can be sent then.
        """
        cdef int outcome, wait_ms = LEAST_WAIT_MS
        cdef bint has_requests = False, is_last
        with nogil:
            while True:
                is_last = load_int(&self.stopped) != 0
                outcome = self._wait(0 if is_last else 1 if owes else wait_ms)
                if outcome < 0:
                    break
                has_requests = outcome > 0
                outcome = self._send_batches()
                if outcome < 0 or has_requests or is_last or owes:
                    break
                if load_int(&self.queue.merging) or load_int(&self.queue.refused):
                    break
                wait_ms = <int> LEAST_WAIT_MS if outcome > 0 else min(2 * wait_ms, <int> MAX_WAIT_MS)
        if outcome == OUT_OF_MEMORY:
            raise MemoryError("no memory for a batch of events")
        if outcome < 0:
            raise OSError(self.last_error, "libzmq cannot send or poll")
        return has_requests

    def go_on(self, Reply reply not None):
        """Send more of a reply, as far as its client takes it.

        Returns
        -------
        bool
            Whether that was the end.

        Raises
        ------
        OSError
            The client has gone.
        """
        cdef int outcome
        with nogil:
            outcome = self._go_on_with_held(reply) if reply.is_snapshot else self._go_on_with_kept(reply)
        if outcome == OUT_OF_MEMORY:
            raise MemoryError("no memory for a snapshot")
        if outcome < 0:
            raise OSError(self.last_error, "a client has gone")
        return outcome == 0

    cdef int _go_on_with_kept(self, Reply reply) noexcept nogil:
        cdef const Payload* payload
        cdef uint64_t last = reply.num_messages + MAX_REPLIES
        cdef int outcome
        # What is no longer kept is a gap, which the client sees.
        reply.next_seq = max(reply.next_seq, self.log.oldest_kept())
        while reply.next_seq < <uint64_t> self.log.num_made:
            if reply.num_messages == last:
                return TAKES_NO_MORE
            payload = self.log.payload_of(reply.next_seq)
            outcome = self._reply(reply, self.topic_frame, reply.next_seq, Frame(payload.data, payload.size))
            if outcome != 0:
                return outcome
            reply.next_seq += 1
        return self._reply(reply, Frame(NULL, 0), END_OF_REPLAY, Frame(NULL, 0))

    cdef int _go_on_with_held(self, Reply reply) noexcept nogil:
        cdef uint8_t[MAX_CONTROL_BYTES] end
        cdef uint64_t last = reply.num_messages + MAX_REPLIES
        cdef HeldKeys* held = &reply.held
        cdef Py_ssize_t n
        cdef int outcome
        if not reply.has_begun and reply.has_keys and self.log.copy_held(held) < 0:
            held.keys[<int> CPU] = held.keys[<int> STORAGE] = NULL
            return OUT_OF_MEMORY
        if not reply.has_begun and not reply.has_keys:
            held.seq = self.log.num_made
            self.log.digests(held.digests)
        reply.has_begun = True
        while reply.medium < <int> NUM_MEDIA:
            n = min(<Py_ssize_t> SNAPSHOT_KEYS, held.num_keys[reply.medium] - reply.next_key)
            if n == 0:
                reply.medium += 1
                reply.next_key = 0
                continue
            if reply.num_messages == last:
                return TAKES_NO_MORE
            if self.log.encode_part(
                    reply.medium, self.block_size, held.keys[reply.medium] + reply.next_key, n) < 0:
                return OUT_OF_MEMORY
            outcome = self._reply(reply, self.topic_frame, held.seq, Frame(
                self.log.part.data + self.log.part.start, self.log.part.size - self.log.part.start))
            if outcome != 0:
                return outcome
            reply.next_key += n
        # Its payload says which batch comes next, and whether the snapshot arrived whole.
        return self._reply(
            reply, Frame(NULL, 0), END_OF_REPLAY,
            Frame(&end[0], encode_digest(end, held.seq, held.digests, self.epoch)))

    cdef int _wait(self, int wait_ms) noexcept nogil:
        """Wait for a request; return whether there is one, or -1."""
        cdef PollItem item = PollItem(self.router, 0, POLL_IN, 0)
        cdef int outcome = self.poll(&item, 1 if self.router != NULL else 0, wait_ms)
        if outcome < 0:
            self.last_error = self.error()
            return 0 if self.last_error == EINTR else -1
        return outcome

    cdef int _send_batches(self) noexcept nogil:
        """Send all that is queued; return how many batches, -1 (libzmq's error) or OUT_OF_MEMORY."""
        cdef int num_batches = 0, outcome
        while True:
            outcome = self.log.make_batch()
            if outcome < 0:
                return OUT_OF_MEMORY
            if outcome == 0:
                return num_batches
            # Events without a key make no batch.
            if self.num_sent < <uint64_t> self.log.num_made:
                if self._send_batch() < 0:
                    return -1
                num_batches += 1
            self.queue.mark_sent()

    cdef int _send_batch(self) noexcept nogil:
        cdef const Payload* payload = self.log.payload_of(self.num_sent)
        cdef MediumDigest[NUM_MEDIA] digests
        cdef uint8_t[MAX_CONTROL_BYTES] control
        cdef uint64_t seq = self.num_sent
        if self._publish(self.topic_frame, seq, Frame(payload.data, payload.size)) < 0:
            return -1
        self.num_sent += 1
        # The first batch has one, too: it says early that this publisher is another one than before.
        if self.digest_every == 0 or (self.num_sent % self.digest_every and self.num_sent > 1):
            return 0
        self.log.digests(digests)
        return self._publish(
            self.digest_topic_frame, seq, Frame(&control[0], encode_digest(control, seq, digests, self.epoch)))

    cdef int _publish(self, Frame topic, uint64_t seq, Frame payload) noexcept nogil:
        cdef uint8_t[SEQ_BYTES] number
        cdef Frame[3] frames = [topic, Frame(&number[0], SEQ_BYTES), payload]
        put_seq(number, seq)
        return self._send_frames(self.pub, frames, 3)

    cdef int _reply(self, Reply reply, Frame topic, uint64_t seq, Frame payload) noexcept nogil:
        """Send a message of a reply: 0, TAKES_NO_MORE (nothing was sent) or -1: the client has gone."""
        cdef uint8_t[SEQ_BYTES] number
        cdef Frame[5] frames = [reply.to, Frame(NULL, 0), topic, Frame(&number[0], SEQ_BYTES), payload]
        put_seq(number, seq)
        if self._send_frames(self.router, frames, 5) < 0:
            return TAKES_NO_MORE if self.last_error == EAGAIN else -1
        reply.num_messages += 1
        return 0

    cdef int _send_frames(self, void* socket, const Frame* frames, int n) noexcept nogil:
        cdef int i = 0
        while i < n:
            if self.send(socket, frames[i].data, frames[i].size, SEND_MORE if i < n - 1 else 0) >= 0:
                i += 1
                continue
            self.last_error = self.error()
            if self.last_error != EINTR:
                return -1
        return 0


cdef Frame frame_of(bytes data):
    return Frame(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


cdef object address_of(library, name):
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        raise ImportError(f"pyzmq's library does not give {name}: install a pyzmq that was built by CPython") from None
