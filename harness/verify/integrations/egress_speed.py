"""Compares three paths from a sandbox to the same server, in rounds that use each path once:

    address   admitted by a rule for its address: the sandbox's own path, without the proxy
    name      admitted by its name: through `cube-egress`, unread
    rule      with a rule for its name: TLS ends at `cube-egress`, which adds a header

    run.py --only egress_speed …        5 rounds; with CUBE_LONG=1, 40

The client, Python in the guest, is the same for all, and verifies no certificate. P50 is the median of 120 requests on a warm
connection; the ratios are medians over rounds of values that were measured within seconds of each other.
"""

import argparse
import json
import statistics
import sys

from e2b import ALL_TRAFFIC, Sandbox, Secret, SecretNotFoundException

NAME, ADDRESS = "origin.test", "192.0.2.2"
BULK = 32 << 20
CLIENT = """
import json, socket, ssl, sys, time
place, bulk = sys.argv[1], int(sys.argv[2])
context = ssl._create_unverified_context()
stream = socket.create_connection((place, 443), 30)
stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
stream = context.wrap_socket(stream, server_hostname="origin.test")
buffer = bytearray(1 << 18)
def get(path, length):
    stream.sendall(b"GET /%s HTTP/1.1\\r\\nHost: origin.test\\r\\n\\r\\n" % path)
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        part = stream.recv(65536)
        assert part, "the connection was closed"
        head += part
    assert head.startswith(b"HTTP/1.1 200"), head
    left = length - len(head.partition(b"\\r\\n\\r\\n")[2])
    while left:
        read = stream.recv_into(buffer, min(left, len(buffer)))
        assert read, "the connection was closed"
        left -= read
def timed(path, length):
    begin = time.perf_counter()
    get(path, length)
    took = time.perf_counter() - begin
    time.sleep(0.008)  # a sandbox may send 200 requests a second through a rule
    return took
for _ in range(20):
    get(b"", 2)
times = sorted(timed(b"", 2) for _ in range(120))
took = timed(b"%d" % bulk, bulk)
print(json.dumps({"p50_ms": times[59] * 1e3, "mb_s": bulk / took / 1e6}))
"""


def create(path: str) -> Sandbox:
    allowed = f"{ADDRESS}/32" if path == "address" else NAME
    network = {"deny_out": [ALL_TRAFFIC], "allow_out": [allowed]}
    if path == "rule":
        network["rules"] = {NAME: [{"transform": {"headers": {"x-api-key": Secret.fill("speed")}}}]}
    sandbox = Sandbox.create("base", timeout=3600, network=network)
    sandbox.files.write("/tmp/client.py", CLIENT)
    return sandbox


def measure(sandbox: Sandbox, path: str) -> dict[str, float]:
    place = ADDRESS if path == "address" else NAME
    return json.loads(sandbox.commands.run(f"python3 /tmp/client.py {place} {BULK}", timeout=120).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    try:
        Secret.update("speed", "a-value-of-the-secret")
    except SecretNotFoundException:
        Secret.create("speed", "a-value-of-the-secret")
    paths = ["address", "name", "rule"]
    sandboxes = {path: create(path) for path in paths}
    found: dict[str, list[dict[str, float]]] = {path: [] for path in paths}
    for number in range(rounds):
        # Each path comes first equally often.
        for path in paths[number % 3 :] + paths[: number % 3]:
            found[path].append(measure(sandboxes[path], path))
    for sandbox in sandboxes.values():
        sandbox.kill()
    figures: dict[str, object] = {"rounds": rounds}
    for path in paths:
        figures[path] = {key: round(statistics.median(one[key] for one in found[path]), 3) for key in ("p50_ms", "mb_s")}
        if path == "address":
            continue
        pairs = list(zip(found[path], found["address"]))
        figures[path] |= {
            "latency_ratio": round(statistics.median(a["p50_ms"] / b["p50_ms"] for a, b in pairs), 2),
            "added_ms": round(statistics.median(a["p50_ms"] - b["p50_ms"] for a, b in pairs), 3),
            "throughput_ratio": round(statistics.median(a["mb_s"] / b["mb_s"] for a, b in pairs), 2),
        }
    print(rounds, "rounds of", *paths)
    print(json.dumps(figures), file=sys.stderr)


if __name__ == "__main__":
    main()

# Prints:
# … rounds of address name rule
