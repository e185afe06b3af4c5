"""Reseeds generators in a cloned process.

Clones of a snapshot resume with equal generators, except that of the kernel. From it, all generators of this process
are reseeded before the next cell runs. OpenSSL's generators are replaced by ones that read from the kernel each time,
so they need no reseeding. Not covered: the secret of `hash(str)`, which a running interpreter cannot change.
"""

import os
import sys

# 32-bit words in the state of a Mersenne Twister. In numpy's state, the position of the next word follows them.
WORDS = 624
# Modules and generators that were loaded before the snapshot: searching for them in a clone would touch more pages.
_modules = {}
_noted = []
# numpy's global generator, the address of its words, and the address of its flag for a cached number.
_numpy = None


def use_kernel_for_openssl():
    """Replaces OpenSSL's generators, whose state forks of a sandbox would share, by the kernel's."""
    import ctypes

    here = os.path.dirname(os.path.abspath(__file__))
    method = ctypes.c_char.in_dll(ctypes.CDLL(os.path.join(here, "../../random.so")), "cube_random")
    openssl = ctypes.CDLL("libcrypto.so.3")
    if openssl.RAND_set_rand_method(ctypes.byref(method)) != 1:
        raise OSError("OpenSSL does not take another generator")


def load_ahead():
    """Loads the modules that are reseeded before all others, so that their state is adjacent in memory."""
    import multiprocessing.process  # noqa: F401
    import random  # noqa: F401
    import tempfile  # noqa: F401
    import uuid  # noqa: F401

    import numpy.random  # noqa: F401


def note_generators():
    """Finds the `random.Random` objects of modules and other state that needs reseeding."""
    import gc
    import random

    _noted[:] = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, random.Random)
        and not isinstance(thing, random.SystemRandom)
        and thing is not random._inst
    ]
    for name in ("random", "numpy.random", "uuid", "tempfile", "multiprocessing.process"):
        if name in sys.modules:
            _modules[name] = sys.modules[name]
    if "numpy.random" in _modules:
        note_numpy()


def note_numpy():
    """Finds the state of numpy's global generator. numpy's own function for seeding would touch a megabyte in each
    clone, much of which the clone would copy."""
    global _numpy
    import ctypes
    import struct

    import numpy

    def memory(at, size):
        return memoryview((ctypes.c_char * size).from_address(at)).cast("B")

    rand = numpy.random.mtrand._rand
    numpy.random.seed(1)
    # Numbers of this distribution are generated in pairs, so one is cached from now on.
    numpy.random.standard_normal()
    kind, words, position, has_gauss, gauss = numpy.random.get_state()
    state = memory(rand._bit_generator.ctypes.state_address, WORDS * 4 + 4)
    known = words.astype("<u4").tobytes() + int(position).to_bytes(4, "little")
    whole = memory(id(rand), type(rand).__basicsize__)
    pair = struct.pack("<i4xd", 1, gauss)
    kept = bytes(whole).find(pair)
    if kind != "MT19937" or state != known or not has_gauss or kept < 0:
        return
    flag = whole[kept : kept + 4]
    flag[:] = bytes(4)
    if not numpy.random.get_state()[3]:
        _numpy = (rand, rand._bit_generator, state, flag)


def reseed():
    """Reseeds loaded modules. Modules that are loaded later seed themselves from the kernel."""
    for generator in _noted:
        generator.seed(number())
    if random := module("random"):
        random.seed(number())
    if numpy_random := module("numpy.random"):
        seed_numpy(numpy_random)
    if uuid := module("uuid"):
        # `uuid1` uses a node, a clock sequence and the last time. The C library's are inaccessible; without it, the
        # sequence is random each time. This bit marks a node that is not a hardware address.
        uuid._generate_time_safe = None
        uuid._node = int.from_bytes(os.urandom(6), "little") | 1 << 40
        uuid._last_timestamp = None
    if tempfile := module("tempfile"):
        tempfile._name_sequence = None
    if process := module("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if torch := module("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))


def module(name):
    return _modules.get(name) or sys.modules.get(name)


def number():
    return int.from_bytes(os.urandom(32), "little")


def seed_numpy(numpy_random):
    rand = numpy_random.mtrand._rand
    if _numpy is not None and rand is _numpy[0] and rand._bit_generator is _numpy[1]:
        _, _, state, flag = _numpy
        state[: WORDS * 4] = os.urandom(WORDS * 4)
        # Marks all words as used, so that the next number starts with a new generation.
        state[WORDS * 4 :] = WORDS.to_bytes(4, "little")
        flag[:] = bytes(4)
        return
    words = [int.from_bytes(os.urandom(4), "little") for _ in range(8)]
    numpy_random.seed(words)
