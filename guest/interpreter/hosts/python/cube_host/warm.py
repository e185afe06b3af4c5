"""Typical first cells. They run once before the snapshot, so that every clone has what they load."""

CELLS = (
    """
import json, math, os, random, re, sys, time, datetime, collections, itertools, functools, pathlib
import asyncio, subprocess, tempfile, uuid, ssl, hashlib, csv, io, textwrap, urllib.request
""",
    "import numpy as np; np.arange(3).sum()",
    """
import pandas as pd
frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
frame.groupby("b").a.sum()
frame.describe()
frame
""",
    """
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 2, 3], [1, 4, 9], label="line")
axes.legend()
plt.show()
""",
    "import requests, scipy, sklearn, sklearn.linear_model, PIL.Image, orjson",
    "!true",
    "%time 1",
    "1/0",
    # Repeated until Python has specialized the byte code, which would otherwise copy pages in each clone.
    """
for turn in range(100):
    random.sample(range(1000), 50), random.choices("ab", k=9), random.choice("ab"), random.randint(1, 9)
    random.shuffle([1, 2, 3]), random.uniform(0, 1), random.gauss(0, 1), random.random()
    sum([1, 2]), max(1, 2), len("ab"), sorted([2, 1]), round(1.5, 1), math.sqrt(2), math.log(3, 4), math.ceil(0.5)
""",
    "[1, {'a': 2}]",
    "{'a': [1.5]}",
    "{'a': 1.5, 'b': None}",
    "['a', 1]",
    "(1, 2.5)",
    "await asyncio.sleep(0)",
    "print('hello')",
    "1+1",
    "x = 1; x",
    "1+1",
)
