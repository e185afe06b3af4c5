"""New random state in a process whose memory was copied.

Clones of a snapshot wake up with the same generators. The kernel's is another one in each clone by then;
from it, everything in this process that generates on its own is seeded anew before the next cell runs.
OpenSSL's generators are made to draw from the kernel each time, so nothing of theirs is left to be seeded.
Not covered: the secret of `hash(str)`, which no running interpreter can change.
"""

import os
import sys

# 32-bit words of a Mersenne Twister; in numpy's, the position of the next one follows them.
WORDS = 624
# Modules and generators that were loaded before the snapshot: to look for them in a clone would touch more.
_modules = {}
_noted = []
# numpy's global generator, where its words are, and where it has the flag of a number that it keeps.
_numpy = None


def use_kernel_for_openssl():
    """Replaces OpenSSL's generators, which a fork of a sandbox would share, by the kernel's."""
    import ctypes

    here = os.path.dirname(os.path.abspath(__file__))
    method = ctypes.c_char.in_dll(ctypes.CDLL(os.path.join(here, "../../random.so")), "cube_random")
    openssl = ctypes.CDLL("libcrypto.so.3")
    if openssl.RAND_set_rand_method(ctypes.byref(method)) != 1:
        raise OSError("OpenSSL does not take another generator")


def load_ahead():
    """Loads what is seeded before everything else, so that it lies together."""
    import multiprocessing.process  # noqa: F401
    import random  # noqa: F401
    import tempfile  # noqa: F401
    import uuid  # noqa: F401

    import numpy.random  # noqa: F401


def note_generators():
    """Finds the `random.Random` objects that modules keep for themselves, and what else is to be seeded."""
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
    """Where numpy keeps its state. Seeding it by its own function runs through a megabyte of numpy, which
    each clone would read and a good part of which it would copy."""
    global _numpy
    import ctypes
    import struct

    import numpy

    def memory(at, size):
        return memoryview((ctypes.c_char * size).from_address(at)).cast("B")

    rand = numpy.random.mtrand._rand
    numpy.random.seed(1)
    # Numbers of this distribution are made in pairs: from now on one is kept.
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
    """Seeds what is loaded; what is not loaded will seed itself from the kernel."""
    for generator in _noted:
        generator.seed(number())
    if random := module("random"):
        random.seed(number())
    if numpy_random := module("numpy.random"):
        seed_numpy(numpy_random)
    if uuid := module("uuid"):
        # `uuid1` has node, clock sequence and the last time in it. The C library keeps them where nobody can
        # change them; without it the sequence is drawn anew each time. A node that is no card's has this bit.
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
        # All words are used up: the next number begins with a round of mixing.
        state[WORDS * 4 :] = WORDS.to_bytes(4, "little")
        flag[:] = bytes(4)
        return
    words = [int.from_bytes(os.urandom(4), "little") for _ in range(8)]
    numpy_random.seed(words)
