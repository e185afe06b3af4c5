"""A cheap server for `egress_speed.py`: TLS, one thread per connection, no logs.

    GET /          a response of 2 bytes
    GET /NUMBER    a response of this many bytes
"""

import socket
import ssl
import threading

PIECE = bytes(1 << 20)


def serve(address: str, certificate: str) -> None:
    """`certificate`: a PEM file with key and chain. Does not return."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server((address, 443), backlog=128)
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=converse, args=(context, stream), daemon=True).start()


def converse(context: ssl.SSLContext, stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with context.wrap_socket(stream, server_side=True) as stream:
            requests = b""
            while part := stream.recv(65536):
                requests += part
                while b"\r\n\r\n" in requests:
                    head, _, requests = requests.partition(b"\r\n\r\n")
                    answer(stream, head.split()[1].lstrip(b"/"))
    except (OSError, ValueError, IndexError):
        # The client is gone, or sent something else.
        pass


def answer(stream: ssl.SSLSocket, path: bytes) -> None:
    left = int(path or b"2")
    stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left + PIECE[: min(left, 2)])
    left -= min(left, 2)
    while left:
        stream.sendall(PIECE[: min(left, len(PIECE))])
        left -= min(left, len(PIECE))
