"""Where the memory of a clone's first cells comes from.

Importing what users import leaves holes all over the heap, and each object that a cell makes lands in another
one: in a page of its own, which each clone has to copy. Before a snapshot the holes are therefore filled, for
good, so that what is made afterwards lies together.
"""

import ctypes
import gc

# CPython's allocator (obmalloc.c): blocks of up to 512 bytes in steps of 16 lie in pools, pools in arenas. The
# first block of a pool follows its header.
STEP = 16
LARGEST = 512
POOL = 1 << 14
ARENA = 1 << 20
HEADER = 48
# `sys.getsizeof(b"")`, of which the last byte is the terminator.
BYTES = 33
# The size of integers, floats and complex numbers, and how many blocks of that size and less are taken.
SMALL = 32
PLENTY = 1 << 17
# Blocks of one size that are taken at most.
MOST = 1 << 19
# What the C library is asked for, at most: longer allocations are mappings, or come from the end of the heap.
LONGEST = 64 << 10

_held = []


def settle():
    """Fills the holes. To be called before everything that a first cell needs is made for the last time."""
    # Also empties the lists of free objects that types keep for themselves.
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    fill_heap(libc)
    fill_pools()


def fill_pools():
    # Blocks of the largest size take whole pools: all that are free, until half an arena of them in order is new.
    take(LARGEST, ARENA // 2 // LARGEST)
    for size in range(LARGEST, SMALL, -STEP):
        # A pool is begun when all that were begun before are full.
        take(size, POOL // size - 1)
    # Counting needs integers, which are of this size: these are not looked at, but taken in plenty.
    _held.append([complex() for _ in range(PLENTY)])
    _held.append([object() for _ in range(PLENTY)])


def take(size, in_order):
    """Takes blocks until as many have come one behind the other, and then to the begin of a pool."""
    run = last = 0
    # Another allocator than CPython's own may never do that: then there is nothing to be gained.
    for _ in range(MOST):
        if run >= in_order and last % POOL == HEADER:
            break
        _held.append(bytes(size - BYTES))
        at = id(_held[-1])
        run = run + 1 if 0 < at - last <= size + HEADER + size else 0
        last = at


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def fill_heap(libc):
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = libc.sbrk.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = Mallinfo
    end = libc.sbrk(0) - libc.mallinfo2().keepcost
    size = LONGEST
    while size >= STEP:
        # Never freed; what comes from behind the holes is.
        while (at := libc.malloc(size)) and at < end:
            pass
        libc.free(at)
        size -= max(STEP, size // 32 // STEP * STEP)
