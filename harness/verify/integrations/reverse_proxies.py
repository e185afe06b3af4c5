"""The reverse proxies of docs/operate/routing.md, with Debian's programs and the page's configurations, in front of the run's
server.

    reverse_proxies.py DIR      DIR has the programs, unpacked
"""

import base64
import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from e2b import PtySize, Sandbox

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "operate" / "routing.md"
PROXY = "http://127.0.0.1:8080"
# The page's wording for a one-line configuration.
BARE = "server { listen 8080; location / { proxy_pass http://127.0.0.1:3000; } }"
# Larger than all buffers and nginx's body limit.
LARGE = 20 << 20
# Responds to a WebSocket request (RFC 6455, 4.2.2; HAProxy checks the field), and then echoes each piece of data.
ECHO = """
import base64, hashlib, re, socket
listener = socket.create_server(("127.0.0.1", 8000))
while True:
    client, _ = listener.accept()
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += client.recv(1)
    if b"upgrade: websocket" not in head.lower():
        client.close()
        continue
    key = re.search(rb"(?i)sec-websocket-key: (\\S+)", head)[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key).digest())
    client.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: upgrade\\r\\n")
    client.sendall(b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    while data := client.recv(4096):
        client.sendall(data)
"""


def until(what: str, condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)


def blocks() -> dict[str, str]:
    """The configurations of the page by the language of their blocks."""
    found = re.findall(r"^```(nginx|caddyfile|haproxy)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 3, found
    return dict(found)


def nginx(programs: pathlib.Path, place: pathlib.Path, block: str) -> list[object]:
    """Debian's `nginx.conf` includes the block in `http`."""
    temporary = "".join(f"{name}_temp_path {place}/{name};" for name in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"])
    (place / "nginx.conf").write_text(
        f"daemon off; pid {place}/pid; user root; error_log stderr; events {{}} http {{ access_log off; {temporary}\n{block}\n}}"
    )
    return [programs / "usr/sbin/nginx", "-p", place, "-e", "stderr", "-c", place / "nginx.conf"]


def caddy(programs: pathlib.Path, place: pathlib.Path, block: str) -> list[object]:
    (place / "Caddyfile").write_text(block)
    return [programs / "usr/bin/caddy", "run", "--config", place / "Caddyfile"]


def haproxy(programs: pathlib.Path, place: pathlib.Path, block: str) -> list[object]:
    (place / "haproxy.cfg").write_text(block)
    return [programs / "usr/sbin/haproxy", "-db", "-f", place / "haproxy.cfg"]


@contextlib.contextmanager
def running(start, programs: pathlib.Path, block: str):
    with tempfile.TemporaryDirectory() as place, open(pathlib.Path(place) / "log", "w+") as log:
        words = start(programs, pathlib.Path(place), block)
        environment = {**os.environ, "HOME": place}
        program = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, env=environment)
        try:
            until("the proxy", lambda: is_healthy() or program.poll() is not None)
            yield
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            program.terminate()
            program.wait()


def is_healthy() -> bool:
    try:
        with urllib.request.urlopen(f"{PROXY}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def checks() -> float:
    """Requests for the server's health so far."""
    request = urllib.request.Request("http://127.0.0.1:3000/metrics", headers={"X-API-Key": os.environ["E2B_API_KEY"]})
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    counts = [float(line.split()[-1]) for line in lines if line.startswith("cube_api_requests_total{") and '"/health"' in line]
    return sum(counts)


def commands(sandbox: Sandbox) -> None:
    """Each event of a stream arrives while the stream is open: the command waits for its input."""
    output = []
    handle = sandbox.commands.run("cat", background=True, stdin=True, timeout=60)
    for word in ["one", "two"]:
        sandbox.commands.send_stdin(handle.pid, f"{word}\n")
    for out, _, _ in handle:
        output.append(out or "")
        if "two" in "".join(output):
            break
    sandbox.commands.kill(handle.pid)
    terminal = sandbox.pty.create(PtySize(24, 80), timeout=60)
    sandbox.pty.send_stdin(terminal.pid, b"echo te''rminal\n")
    seen = b""
    for _, _, data in terminal:
        seen += data or b""
        if b"terminal\r\n" in seen:
            break
    sandbox.pty.kill(terminal.pid)


def large_file(sandbox: Sandbox) -> None:
    content = os.urandom(LARGE)
    sandbox.files.write("/tmp/large", content)
    assert sandbox.files.read("/tmp/large", format="bytes") == content


def web_socket(sandbox: Sandbox) -> None:
    with socket.create_connection(("127.0.0.1", 8080), 60) as client:
        path = f"/sandbox/{sandbox.sandbox_id}/8000/"
        key = base64.b64encode(os.urandom(16)).decode()
        client.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = client.recv(1)
            assert byte, head
            head += byte
        assert head.startswith(b"HTTP/1.1 101 "), head
        for word in [b"ping", b"pong"]:
            client.sendall(word)
            assert client.recv(100) == word


def main(programs: pathlib.Path) -> None:
    pages = blocks()
    configured = [("nginx", nginx, pages["nginx"]), ("Caddy", caddy, pages["caddyfile"]), ("HAProxy", haproxy, pages["haproxy"])]
    url = {"api_url": PROXY, "sandbox_url": PROXY}
    with running(nginx, programs, BARE), Sandbox.create(timeout=120, **url) as sandbox:
        commands(sandbox)
        print("nginx with proxy_pass only: streams and terminals")
    for name, start, block in configured:
        with running(start, programs, block), Sandbox.create(timeout=120, **url) as sandbox:
            commands(sandbox)
            large_file(sandbox)
            sandbox.files.write("/tmp/echo.py", ECHO)
            sandbox.commands.run("python3 /tmp/echo.py", background=True, timeout=0)
            until("the program", lambda: sandbox.commands.run("grep -q ':1F40 ' /proc/net/tcp || echo none").stdout == "")
            web_socket(sandbox)
            if name != "nginx":
                # nginx has no active checks. The others take the server out of use after three failed checks.
                before = checks()
                until("checks of the server's health", lambda: checks() >= before + 4)
                assert is_healthy()
            print(f"{name}: streams, terminals, {LARGE >> 20} MiB, a WebSocket, health checks")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

# Prints:
# nginx with proxy_pass only: streams and terminals
# nginx: streams, terminals, 20 MiB, a WebSocket, health checks
# Caddy: streams, terminals, 20 MiB, a WebSocket, health checks
# HAProxy: streams, terminals, 20 MiB, a WebSocket, health checks
