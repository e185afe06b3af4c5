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
# Generators of modules that were loaded before the snapshot.
_noted = []
# The state of numpy's global generator as bytes, where that is known to hold nothing else.
_numpy_state = None


def use_kernel_for_openssl():
    """Replaces OpenSSL's generators, which a fork of a sandbox would share, by the kernel's."""
    import ctypes

    here = os.path.dirname(os.path.abspath(__file__))
    method = ctypes.c_char.in_dll(ctypes.CDLL(os.path.join(here, "../../random.so")), "cube_random")
    openssl = ctypes.CDLL("libcrypto.so.3")
    if openssl.RAND_set_rand_method(ctypes.byref(method)) != 1:
        raise OSError("OpenSSL does not take another generator")


def note_generators():
    """Finds the `random.Random` objects that modules keep for themselves, and numpy's global generator."""
    import gc
    import random

    _noted[:] = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, random.Random)
        and not isinstance(thing, random.SystemRandom)
        and thing is not random._inst
    ]
    if "numpy.random" in sys.modules:
        note_numpy()


def note_numpy():
    """Where numpy keeps its state. Seeding it by its own function runs through a megabyte of numpy, which
    each clone would read and a good part of which it would copy."""
    global _numpy_state
    import ctypes

    import numpy

    numpy.random.seed(1)
    kind, words, position, has_gauss, _ = numpy.random.get_state()
    at = numpy.random.mtrand._rand._bit_generator.ctypes.state_address
    state = memoryview((ctypes.c_char * (WORDS * 4 + 4)).from_address(at)).cast("B")
    known = words.astype("<u4").tobytes() + int(position).to_bytes(4, "little")
    if kind == "MT19937" and not has_gauss and state == known:
        _numpy_state = state


def reseed(untouched=False):
    """Seeds what is loaded; what is not loaded will seed itself from the kernel. `untouched` says that no
    cell of a user has run: what was noted of numpy still holds."""
    modules = sys.modules
    for generator in _noted:
        generator.seed(number())
    if random := modules.get("random"):
        random.seed(number())
    if "numpy.random" in modules:
        seed_numpy(modules["numpy.random"], untouched)
    if uuid := modules.get("uuid"):
        # `uuid1` has node, clock sequence and the last time in it. The C library keeps them where nobody can
        # change them; without it the sequence is drawn anew each time.
        uuid._generate_time_safe = None
        uuid._node = uuid._random_getnode()
        uuid._last_timestamp = None
    if tempfile := modules.get("tempfile"):
        tempfile._name_sequence = None
    if process := modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if torch := modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))


def number():
    return int.from_bytes(os.urandom(32), "little")


def seed_numpy(numpy_random, untouched):
    if untouched and _numpy_state is not None:
        _numpy_state[: WORDS * 4] = os.urandom(WORDS * 4)
        # All words are used up: the next number begins with a round of mixing.
        _numpy_state[WORDS * 4 :] = WORDS.to_bytes(4, "little")
        return
    words = [int.from_bytes(os.urandom(4), "little") for _ in range(8)]
    numpy_random.seed(words)
