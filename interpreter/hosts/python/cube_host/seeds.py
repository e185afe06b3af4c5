"""New random state in a process whose memory was copied.

Clones of a snapshot wake up with the same generators. The kernel's is another one in each clone by then;
from it, everything in this process that generates on its own is seeded anew before the next cell runs.
Not covered: the secret of `hash(str)`, which no running interpreter can change.
"""

import os
import sys

# Generators of modules that were loaded before the snapshot.
_noted = []


def note_generators():
    """Finds the `random.Random` objects that modules keep for themselves."""
    import gc
    import random

    _noted[:] = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom)
    ]


def reseed():
    """Seeds what is loaded; what is not loaded will seed itself from the kernel."""
    modules = sys.modules
    if random := modules.get("random"):
        random.seed(os.urandom(32))
    for generator in _noted:
        generator.seed(os.urandom(32))
    if "numpy.random" in modules:
        words = [int.from_bytes(os.urandom(4), "little") for _ in range(8)]
        modules["numpy.random"].seed(words)
    if ssl := modules.get("_ssl"):
        # Makes OpenSSL's generators draw from the kernel again.
        ssl.RAND_add(os.urandom(32), 32.0)
    if uuid := modules.get("uuid"):
        # `uuid1` has the machine's address and the last time in it.
        uuid._node = None
        uuid._last_timestamp = None
    if tempfile := modules.get("tempfile"):
        tempfile._name_sequence = None
    if process := modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if torch := modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
