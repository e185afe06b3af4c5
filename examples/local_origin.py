"""A service to try policies and secrets with, without the internet: `python3 local_origin.py KEY CERTIFICATE PRIVATE-KEY`.

    192.0.2.1, UDP 53    resolves every name to 192.0.2.1
    192.0.2.1, TCP 443   HTTPS: 200 if the request has KEY in its header X-Api-Key, else 401

Needs root. The service has its own network namespace, behind the interface `origin0`. Both end with the program.
"""

import http.server
import os
import socket
import ssl
import subprocess
import sys
import threading
import time

ADDRESS = "192.0.2.1"  # for documentation (RFC 5737), so no real service has it


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def resolve() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind((ADDRESS, 53))
        while True:
            query, client = udp.recvfrom(512)
            end = query.index(0, 12) + 5
            found = query[end - 4 : end - 2] == b"\0\1"  # asks for an A record
            head = query[:2] + b"\x81\x80\0\1" + bytes([0, found, 0, 0, 0, 0])
            record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(ADDRESS)
            udp.sendto(head + query[12:end] + record * found, client)


class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_right = self.headers["X-Api-Key"] == sys.argv[1]
        body = b"welcome\n" if is_right else b"the key is missing or wrong\n"
        self.send_response(200 if is_right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def connect(service: int) -> None:
    """Connects the host to the namespace that this process is about to get."""
    while os.readlink(f"/proc/{service}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    ip(f"link add origin0 type veth peer name origin1 netns {service}")
    ip("address add 192.0.2.2/30 dev origin0")
    ip("link set origin0 up")


def serve() -> None:
    while "origin1" not in open("/proc/self/net/dev").read():
        time.sleep(0.01)
    ip(f"address add {ADDRESS}/30 dev origin1")
    ip("link set origin1 up")
    threading.Thread(target=resolve, daemon=True).start()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*sys.argv[2:4])
    server = http.server.ThreadingHTTPServer((ADDRESS, 443), Service)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if sys.argv[-1] == "--serve":
    serve()
elif os.fork() == 0:
    connect(os.getppid())
else:
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv, "--serve"])
