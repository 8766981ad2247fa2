"""Touch the pages of fresh memory, in parallel.

Compiled because every byte written is one page fault: threads that waited for the GIL would take turns.
"""

from libc.stdint cimport int64_t, uintptr_t

from kvcache.transfer._native.pthread cimport pthread_create, pthread_join, pthread_t


cdef enum:
    MAX_THREADS = 64
    PAGE_BYTES = 4096


cdef struct Stretch:
    char* start
    char* end


cdef void* _touch(void* argument) noexcept nogil:
    cdef Stretch* stretch = <Stretch*> argument
    cdef volatile char* byte = stretch.start
    while byte < stretch.end:
        byte[0] = 0
        byte += PAGE_BYTES
    return NULL


def touch_pages(uintptr_t address, int64_t num_bytes, int num_threads):
    """Write a zero to every page of a fresh mapping, so that the system backs it now and in parallel.

    Parameters
    ----------
    address : int
        First byte, at a page's start.
    num_bytes : int
        Length of the mapping.
    num_threads : int
        Threads that share the work, 1..64.
    """
    cdef pthread_t[MAX_THREADS] threads
    cdef Stretch[MAX_THREADS] stretches
    cdef int64_t num_pages = (num_bytes + PAGE_BYTES - 1) // PAGE_BYTES
    cdef int i, started = 0
    if not 1 <= num_threads <= MAX_THREADS:
        raise ValueError(f"num_threads must be in 1..{MAX_THREADS}, got {num_threads}")
    with nogil:
        for i in range(num_threads):
            stretches[i].start = <char*> address + num_pages * i // num_threads * PAGE_BYTES
            stretches[i].end = <char*> address + min(num_pages * (i + 1) // num_threads * PAGE_BYTES, num_bytes)
        while started < num_threads - 1 and not pthread_create(&threads[started], NULL, _touch, &stretches[started]):
            started += 1
        # The caller does the last stretch, and those for which no thread could be had.
        for i in range(started, num_threads):
            _touch(&stretches[i])
        for i in range(started):
            pthread_join(threads[i], NULL)
