"""Compacts the allocations of a clone's first cells.

Importing modules leaves holes all over the heap, so each object that a cell creates lands on another page, which every
clone has to copy. Before a snapshot the holes are therefore filled permanently, so that later objects are adjacent.
"""

import ctypes
import gc

# CPython's allocator (obmalloc.c): blocks of up to 512 bytes, in steps of 16, are in pools, and pools in arenas. The first
# block of a pool follows the pool's header.
STEP = 16
LARGEST = 512
POOL = 1 << 14
ARENA = 1 << 20
HEADER = 48
# `sys.getsizeof(b"")`, of which the last byte is the terminator.
BYTES = 33
# Block size of integers, floats and complex numbers, and the number of blocks that are taken of that size and below.
SMALL = 32
PLENTY = 1 << 17
# Largest number of blocks that are taken of one size.
MOST = 1 << 19
# Largest allocation from the C library: longer ones are mappings, or come from the end of the heap.
LONGEST = 64 << 10

_held = []


def settle():
    """Fills the holes. Call it before the objects that a first cell needs are created for the last time."""
    # Also empties the free lists of types.
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    fill_heap(libc)
    fill_pools()


def fill_pools():
    # Blocks of the largest size take whole pools: all free ones, until half an arena of consecutive new ones.
    take(LARGEST, ARENA // 2 // LARGEST)
    for size in range(LARGEST, SMALL, -STEP):
        # A new pool is used only when all used ones are full.
        take(size, POOL // size - 1)
    # Counting needs integers of this size, so addresses are not examined; a large number of blocks is taken.
    _held.append([complex() for _ in range(PLENTY)])
    _held.append([object() for _ in range(PLENTY)])


def take(size, in_order):
    """Takes blocks until that many are adjacent, and then up to the beginning of a pool."""
    run = last = 0
    # An allocator other than CPython's may never return adjacent blocks; then there is nothing to gain.
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
        # Never freed, unlike memory from behind the holes.
        while (at := libc.malloc(size)) and at < end:
            pass
        libc.free(at)
        size -= max(STEP, size // 32 // STEP * STEP)
