"""Ports of a sandbox, as clients reach them. All requests go to the API's address; the Host header selects the sandbox."""

import base64
import http.client
import json
import os
import urllib.parse

from . import Cases, same, sandbox, until

CASES = Cases()
case = CASES


def connection() -> http.client.HTTPConnection:
    url = urllib.parse.urlsplit(os.environ["E2B_SANDBOX_URL"])
    return http.client.HTTPConnection(url.hostname, url.port, timeout=20)


def get(host: str, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str):
    connected = connection()
    connected.request(method, path, body, {"Host": host, **headers})
    answer = connected.getresponse()
    return answer, answer.read()


SERVER = r"""
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        out = json.dumps({"method": self.command, "path": self.path, "body": body.decode(),
                          "headers": {k.lower(): v for k, v in self.headers.items()}}).encode()
        self.send_response(418 if self.path == "/teapot" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Inside", "yes")
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)
    do_GET = do_POST = do_PUT = do_DELETE = answer
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def serve(s, code: str, port: int) -> None:
    s.files.write("/home/user/server.py", code)
    s.commands.run("python3 /home/user/server.py", background=True, timeout=0)
    until("the server", lambda: s.commands.run(f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo up || true").stdout)


@case
def get_host():
    with sandbox() as s:
        host = s.get_host(8000)
        assert host.startswith(f"8000-{s.sandbox_id}."), host


@case
def http_service():
    with sandbox() as s:
        serve(s, SERVER, 8000)
        host = s.get_host(8000)
        answer, body = get(host, "/a%20b?c=d")
        said = json.loads(body)
        same((answer.status, said["method"], said["path"]), (200, "GET", "/a%20b?c=d"))
        same(answer.getheader("X-Inside"), "yes")
        same(said["headers"]["host"], host)
        answer, body = get(host, "/x", "POST", b"hello", **{"X-Mine": "1"})
        said = json.loads(body)
        same((said["method"], said["body"], said["headers"]["x-mine"]), ("POST", "hello", "1"))
        same(get(host, "/teapot")[0].status, 418)


@case
def http_by_headers():
    with sandbox() as s:
        serve(s, SERVER, 8000)
        url = urllib.parse.urlsplit(os.environ["E2B_SANDBOX_URL"])
        answer, body = get(url.netloc, "/y", **{"E2b-Sandbox-Id": s.sandbox_id, "E2b-Sandbox-Port": "8000"})
        same((answer.status, json.loads(body)["path"]), (200, "/y"))


@case
def closed_port():
    with sandbox() as s:
        answer, body = get(s.get_host(8123))
        said = json.loads(body)
        same((answer.status, said["code"], said["port"], said["sandboxId"]), (502, 502, 8123, s.sandbox_id))
        assert "port is not open" in said["message"], said


@case
def unknown_sandbox():
    with sandbox() as s:
        host = s.get_host(8000).replace(s.sandbox_id, "i0123456789abcdefghi")
    answer, body = get(host)
    same(answer.status, 502)
    assert "was not found" in json.loads(body)["message"], body


ECHO = r"""
import asyncio, base64, hashlib
async def serve(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    key = [l.split(": ")[1] for l in head.split("\r\n") if l.lower().startswith("sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                 b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    while data := await reader.read(4096):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", 8765) as server:
        await server.serve_forever()
asyncio.run(main())
"""


@case
def websocket():
    with sandbox() as s:
        serve(s, ECHO, 8765)
        connected = connection()
        key = base64.b64encode(os.urandom(16)).decode()
        headers = {
            "Host": s.get_host(8765), "Upgrade": "websocket", "Connection": "Upgrade",
            "Sec-WebSocket-Key": key, "Sec-WebSocket-Version": "13",
        }
        connected.request("GET", "/", headers=headers)
        stream = connected.sock
        head = b""
        while b"\r\n\r\n" not in head:
            piece = stream.recv(4096)
            assert piece, head
            head += piece
        assert head.startswith(b"HTTP/1.1 101"), head
        for number in range(3):
            frame = b"\x82\x04" + bytes([number] * 4)
            stream.sendall(frame)
            back = b""
            while len(back) < len(frame):
                back += stream.recv(100)
            same(back, frame)


@case
def server_sent_events():
    code = SERVER.replace("do_GET = do_POST", "do_POST").replace(
        "def log_message",
        '''def do_GET(self):
        import time
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for n in range(3):
            self.wfile.write(b"data: %d\\n\\n" % n)
            self.wfile.flush()
            time.sleep(0.5)
        self.close_connection = True
    def log_message''',
    )
    import time

    with sandbox() as s:
        serve(s, code, 8000)
        connected = connection()
        began = time.monotonic()
        connected.request("GET", "/", headers={"Host": s.get_host(8000)})
        answer = connected.getresponse()
        same(answer.readline(), b"data: 0\n")
        first = time.monotonic() - began
        rest = answer.read()
        assert b"data: 2" in rest, rest
        # The later events take a second. The first must arrive before them.
        assert time.monotonic() - began - first > 0.5, "the events arrived together"


@case
def internal_routes_are_closed():
    with sandbox() as s:
        for path in ("/init", "//init", "/freeze", "/%69nit"):
            answer, _ = get(s.get_host(49983), path, "POST", b"{}")
            same((path, answer.status), (path, 404))


@case
def traffic_token():
    with sandbox(network={"allow_public_traffic": False}) as s:
        token = s.traffic_access_token
        assert token
        serve(s, SERVER, 8000)
        host = s.get_host(8000)
        same(get(host)[0].status, 403)
        same(get(host, **{"e2b-traffic-access-token": "wrong"})[0].status, 403)
        same(get(host, **{"e2b-traffic-access-token": token})[0].status, 200)


@case
def mask_request_host():
    with sandbox(network={"mask_request_host": "localhost:${PORT}"}) as s:
        serve(s, SERVER, 8000)
        _, body = get(s.get_host(8000))
        same(json.loads(body)["headers"]["host"], "localhost:8000")


OUT = {"allow_out": ["192.0.2.1", "198.51.100.0/24", "*.example.com"], "deny_out": ["0.0.0.0/0"]}
# An address of a block for documentation (RFC 5737), where no server answers.
UNUSED = "203.0.113.1"


def refused(word: str, **options) -> None:
    """Checks that a sandbox with these options is refused, with an error that contains the word."""
    try:
        with sandbox(**options):
            pass
    except Exception as why:
        assert word in str(why), why
    else:
        raise AssertionError(f"{options} were accepted")


def outbound(s):
    network = s.get_info().network or {}
    return network.get("allow_out"), network.get("deny_out")


@case
def network_allow_out():
    with sandbox(network=OUT) as s:
        same(outbound(s), (OUT["allow_out"], OUT["deny_out"]))
    refused("ALL_TRAFFIC", network={"allow_out": ["example.com"]})
    refused("10.0.0.0/33", network={"allow_out": ["10.0.0.0/33"], "deny_out": ["0.0.0.0/0"]})


@case
def network_deny():
    with sandbox(allow_internet_access=False) as s:
        same(s.get_info().allow_internet_access, False)
        said = s.commands.run(f"curl -sS -m 2 http://{UNUSED}/ || echo refused").stdout
        assert "refused" in said, said
    with sandbox(network={"deny_out": ["8.8.8.8", "10.0.0.0/8"]}) as s:
        same(outbound(s), (None, ["8.8.8.8", "10.0.0.0/8"]))
    refused("example.com", network={"deny_out": ["example.com"]})


@case
def network_update():
    with sandbox(network={"allow_public_traffic": False}) as s:
        s.update_network(OUT)
        same(outbound(s), (OUT["allow_out"], OUT["deny_out"]))
        s.update_network({})
        same(outbound(s), (None, None))
        # An update does not change the access from outside.
        same(s.get_info().network["allow_public_traffic"], False)
        try:
            s.update_network({"deny_out": ["example.com"]})
        except Exception as why:
            assert "example.com" in str(why), why
        else:
            raise AssertionError("a domain in deny_out was accepted")
