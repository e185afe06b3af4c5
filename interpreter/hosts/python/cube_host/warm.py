"""What users do first. It is done once before the snapshot, so that it is in every clone's memory."""

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
