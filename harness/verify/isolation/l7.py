"""Makes attempts against the egress proxy: `l7.py FILE`.

FILE has the attempts as JSON. For each, in order, one line of JSON on standard output describes what the client saw.
Certificates are not verified: a client that means ill does not care whose they are.
"""

import json
import socket
import ssl
import struct
import sys
import time

LIMIT_S = 6.0
# Statuses in HPACK's static table (RFC 7541, appendix A).
STATIC = {8: 200, 9: 204, 10: 206, 11: 304, 12: 400, 13: 404, 14: 500}
# The digits in HPACK's Huffman code (appendix B).
DIGITS = {format(n, "05b"): str(n) for n in range(3)} | {format(0b011001 + n, "06b"): str(n + 3) for n in range(7)}


class Hello:
    """The first flight of a TLS client, and edits of it."""

    def __init__(self, flight):
        # One record or several, which together contain the handshake message.
        self.message = b""
        while flight:
            length = struct.unpack(">H", flight[3:5])[0]
            self.message += flight[5 : 5 + length]
            flight = flight[5 + length :]

    def records(self, size):
        parts = [self.message[at : at + size] for at in range(0, len(self.message), size)]
        return [b"\x16\x03\x01" + struct.pack(">H", len(part)) + part for part in parts]

    def extensions(self):
        """Position of the two bytes with the extensions' length."""
        at = 4 + 2 + 32
        at += 1 + self.message[at]
        at += 2 + struct.unpack(">H", self.message[at : at + 2])[0]
        return at + 1 + self.message[at]

    def insert(self, at, added):
        """Inserts bytes, and adds to the lengths of the message and of its extensions."""
        lengths = self.extensions()
        total = struct.unpack(">H", self.message[lengths : lengths + 2])[0] + len(added)
        message = self.message[:at] + added + self.message[at:]
        message = message[:lengths] + struct.pack(">H", total) + message[lengths + 2 :]
        self.message = message[:1] + struct.pack(">I", len(message) - 4)[1:] + message[4:]

    def replace(self, old, new):
        assert len(old) == len(new) and self.message.count(old) == 1
        self.message = self.message.replace(old, new)

    def second_name(self, first, second):
        """Adds another host name to the list of server names."""
        at = self.message.index(first)
        list_length, name_length = struct.unpack(">H", self.message[at - 5 : at - 3])[0], len(first)
        entry = b"\0" + struct.pack(">H", len(second)) + second
        head = struct.pack(">HH", list_length + 2 + len(entry), list_length + len(entry))
        self.message = self.message[: at - 7] + head + self.message[at - 3 :]
        self.insert(at + name_length, entry)


def shaped(flight, attempt):
    """The parts in which the first flight is sent."""
    hello = Hello(flight)
    if "patch" in attempt:
        hello.replace(*(text.encode("latin-1") for text in attempt["patch"]))
    if "second_name" in attempt:
        hello.second_name(attempt["sni"].encode(), attempt["second_name"].encode())
    if "extension" in attempt:
        number, length = attempt["extension"]
        hello.insert(hello.extensions() + 2, struct.pack(">HH", number, length) + bytes(length))
    if attempt.get("fragments"):
        # Records of 16 bytes, and segments whose ends differ from those of the records.
        data = b"".join(hello.records(16))
        return [data[at : at + 23] for at in range(0, len(data), 23)]
    return [b"".join(hello.records(16384))]


def address_of(host):
    """An address of a host. The resolver limits queries per second and refuses the rest for a while."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > deadline:
                raise
            time.sleep(0.3)


class Stream:
    """A connection with or without TLS."""

    def __init__(self, attempt):
        self.deadline = time.monotonic() + LIMIT_S
        self.ended = None
        self.alert = None
        address = attempt.get("address") or address_of(attempt["to"])
        self.socket = socket.create_connection((address, attempt["port"]), LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tls = None
        if not attempt.get("raw"):
            self.handshake(attempt)

    def handshake(self, attempt):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        protocols = attempt.get("alpn", []) + ["x%0253d" % n for n in range(attempt.get("padding", 0))]
        if protocols:
            context.set_alpn_protocols(protocols)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=attempt.get("sni"))
        is_first = True
        while True:
            try:
                self.tls.do_handshake()
                self.flush()
                return
            except ssl.SSLWantReadError:
                if is_first:
                    for part in shaped(self.outgoing.read(), attempt):
                        self.socket.sendall(part)
                    is_first = False
                self.flush()
                self.incoming.write(self.receive())

    def flush(self):
        data = self.outgoing.read()
        if data:
            self.socket.sendall(data)

    def receive(self):
        self.socket.settimeout(max(0.01, self.deadline - time.monotonic()))
        data = self.socket.recv(65536)
        if not data:
            raise EOFError
        return data

    def send(self, data):
        if self.tls is None:
            self.socket.sendall(data)
            return
        self.tls.write(data)
        self.flush()

    def read(self):
        """Some bytes; raises at the end."""
        if self.tls is None:
            return self.receive()
        while True:
            try:
                data = self.tls.read(65536)
            except ssl.SSLWantReadError:
                self.flush()
                self.incoming.write(self.receive())
                continue
            if not data:
                raise EOFError
            return data


def responses(data):
    """Statuses of the complete responses at the start of `data`, and whether it ends with one."""
    statuses = []
    while True:
        end = data.find(b"\r\n\r\n")
        if end < 0 or not data.startswith(b"HTTP/1."):
            return statuses
        head, rest = data[:end].decode("latin-1"), data[end + 4 :]
        status = int(head[9:12])
        fields = {}
        for line in head.split("\r\n")[1:]:
            name, _, value = line.partition(":")
            fields[name.strip().lower()] = value.strip()
        if status == 101 or 100 <= status < 200 or status in (204, 304):
            length = 0
        elif "chunked" in fields.get("transfer-encoding", ""):
            last = rest.find(b"0\r\n\r\n")
            if last < 0:
                return statuses
            length = last + 5
        else:
            length = int(fields.get("content-length", "-1"))
        if length < 0 or len(rest) < length:
            return statuses
        if status >= 101:
            statuses.append(status)
        data = rest[length:]


def literal(name, value):
    fields = [part.encode("latin-1") for part in (name, value)]
    return b"\0" + b"".join(bytes([len(field)]) + field for field in fields)


def frame(kind, flags, stream, content=b""):
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def status_of(block):
    """The first field of a response's head, which is its status."""
    first = block[0]
    if first & 0x80:
        return STATIC.get(first & 0x7F, 0)
    length, text = block[1] & 0x7F, block[2 : 2 + (block[1] & 0x7F)]
    if not block[1] & 0x80:
        return int(text)
    bits, digits = "".join(format(byte, "08b") for byte in text), ""
    while len(digits) < 3 and length:
        size = 5 if bits[:5] in DIGITS else 6
        digits, bits = digits + DIGITS[bits[:size]], bits[size:]
    return int(digits)


def http2(stream, requests, seen):
    """Sends requests on streams 1, 3, ...; `seen` holds the result of each."""
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
    for number, fields in enumerate(requests):
        block = b"".join(literal(name, value) for name, value in fields)
        data += frame(1, 5, 2 * number + 1, block)
    stream.send(data)
    ended, buffer = set(), b""
    while len(ended) < len(requests):
        buffer += stream.read()
        while len(buffer) >= 9:
            length = struct.unpack(">I", b"\0" + buffer[:3])[0]
            if len(buffer) < 9 + length:
                break
            kind, flags, number = buffer[3], buffer[4], struct.unpack(">I", buffer[5:9])[0]
            content, buffer = buffer[9 : 9 + length], buffer[9 + length :]
            seen["text"] += content.decode("latin-1")
            if kind == 1:
                seen["statuses"].append(status_of(content))
            if kind == 4 and not flags & 1:
                stream.send(frame(4, 1, 0))
            if kind == 7 and struct.unpack(">I", content[4:8])[0]:
                seen["ended"] = "goaway"
                return
            if kind == 3:
                seen["ended"] = "reset"
            if kind == 3 or (kind in (0, 1) and flags & 1):
                ended.add(number)


def http1(stream, attempt, seen):
    data = attempt["send"].encode("latin-1")
    pause = attempt.get("then")
    stream.send(data)
    received = b""
    wanted = attempt.get("answers", 1)
    while True:
        statuses = responses(received)
        if pause is not None and statuses:
            stream.send(pause.encode("latin-1"))
            pause, wanted = None, wanted + 1
        seen["statuses"], seen["text"] = statuses, received.decode("latin-1")
        if len(statuses) >= wanted:
            return
        received += stream.read()


def attempted(attempt):
    seen = {"name": attempt["name"], "statuses": [], "text": "", "ended": "open", "issuer": "", "alpn": None}
    stream = None
    try:
        stream = Stream(attempt)
        if stream.tls is not None:
            certificate = stream.tls.getpeercert(True) or b""
            seen["issuer"] = "proxy" if b"cube-egress" in certificate else "origin"
            seen["alpn"] = stream.tls.selected_alpn_protocol()
        if "requests" in attempt:
            http2(stream, attempt["requests"], seen)
        elif "send" in attempt:
            http1(stream, attempt, seen)
        if stream.tls is not None and stream.tls.session is not None:
            seen["ticket"] = stream.tls.session.has_ticket
    except EOFError:
        seen["ended"] = "closed"
    except ssl.SSLError as error:
        seen["ended"] = "alert" if "ALERT" in str(error).upper() else "tls: " + str(error)
    except (ConnectionResetError, BrokenPipeError):
        seen["ended"] = "reset"
    except (TimeoutError, socket.timeout):
        seen["ended"] = "timeout"
    except OSError as error:
        seen["ended"] = "failed: " + str(error)
    finally:
        if stream is not None:
            stream.socket.close()
    seen["text"] = seen["text"][:4096]
    return seen


def followed(attempt, first):
    """The request with which a client follows a redirect: to the new host, with the headers of the first."""
    location = first["text"].partition("ocation: ")[2].split("\r\n")[0]
    host = location.partition("//")[2].partition("/")[0]
    if not host:
        return first | {"ended": "no redirect"}
    fields = f"Host: {host}\r\nX-Api-Key: guests-own\r\nConnection: close\r\n"
    request = f"GET /{attempt['name']} HTTP/1.1\r\n{fields}\r\n"
    return attempted({"name": attempt["name"], "to": host, "sni": host, "port": attempt["port"], "send": request})


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        order = json.load(file)
    # The proxy compares with the resolved names.
    for name in order["names"]:
        address_of(name)
    for attempt in order["attempts"]:
        seen = attempted(attempt)
        if attempt.get("follow"):
            seen = followed(attempt, seen)
        print(json.dumps(seen), flush=True)


main()
