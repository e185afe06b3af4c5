"""Files: every method, both upload formats, signed URLs."""

import os
import time
import urllib.error
import urllib.request

from e2b import FileType, InvalidArgumentException, NotFoundException

from . import Absent, Cases, raises, same, sandbox

CASES = Cases()
case = CASES


@case
def write_and_read():
    with sandbox() as s:
        info = s.files.write("greeting.txt", "hello žluť\n")
        same(info.path, "/home/user/greeting.txt")
        same(info.name, "greeting.txt")
        same(s.files.read("greeting.txt"), "hello žluť\n")
        same(s.files.read("/home/user/greeting.txt"), "hello žluť\n")
        same(s.commands.run("stat -c %U:%G greeting.txt").stdout, "user:user\n")


@case
def write_makes_parents():
    with sandbox() as s:
        s.files.write("/home/user/a/b/c.txt", "x")
        same(s.files.read("a/b/c.txt"), "x")
        same(s.commands.run("stat -c %U a a/b").stdout, "user\nuser\n")


@case
def write_overwrites():
    with sandbox() as s:
        s.files.write("f", "a long text that is there first")
        s.files.write("f", "short")
        same(s.files.read("f"), "short")


@case
def write_many():
    with sandbox() as s:
        infos = s.files.write_files(
            [
                {"path": "one.txt", "data": "1"},
                {"path": "/tmp/two.bin", "data": b"\x00\xff"},
                {"path": "deep/er/three.txt", "data": "3"},
            ]
        )
        same([i.path for i in infos], ["/home/user/one.txt", "/tmp/two.bin", "/home/user/deep/er/three.txt"])
        same(bytes(s.files.read("/tmp/two.bin", format="bytes")), b"\x00\xff")
        same(s.files.write_files([]), [])


@case
def read_formats():
    data = os.urandom(300_000)
    with sandbox() as s:
        s.files.write("raw", data)
        same(bytes(s.files.read("raw", format="bytes")), data)
        same(b"".join(s.files.read("raw", format="stream")), data)


@case
def write_stream():
    import io

    data = os.urandom(5_000_000)
    with sandbox() as s:
        s.files.write("raw", io.BytesIO(data))
        same(bytes(s.files.read("raw", format="bytes")), data)


@case
def gzip_both_ways():
    data = "compress me " * 50_000
    with sandbox() as s:
        s.files.write("z", data, gzip=True)
        same(s.files.read("z"), data)
        same(s.files.read("z", gzip=True), data)
        same(s.commands.run("stat -c %s z").stdout, f"{len(data)}\n")


@case
def octet_stream():
    with sandbox() as s:
        s.files.write("raw", b"\x00\x01\x02", use_octet_stream=True)
        same(bytes(s.files.read("raw", format="bytes")), b"\x00\x01\x02")


@case
def large_file():
    data = os.urandom(32 << 20)
    with sandbox() as s:
        s.files.write("big", data)
        same(bytes(s.files.read("big", format="bytes")), data)


@case
def empty_file():
    with sandbox() as s:
        s.files.write("empty", "")
        same(s.files.read("empty"), "")


@case
def read_missing():
    with sandbox() as s:
        error = raises(NotFoundException, s.files.read, "/no/such")
        assert "/no/such" in str(error), error


@case
def read_directory():
    with sandbox() as s:
        raises(InvalidArgumentException, s.files.read, "/home/user")


@case
def exists():
    with sandbox() as s:
        s.files.write("here", "x")
        same(s.files.exists("here"), True)
        same(s.files.exists("there"), False)
        same(s.files.exists("/home"), True)


@case
def get_info():
    with sandbox() as s:
        s.files.write("f.txt", "12345")
        info = s.files.get_info("f.txt")
        same((info.name, info.path, info.type), ("f.txt", "/home/user/f.txt", FileType.FILE))
        same((info.size, info.mode, info.permissions), (5, 0o644, "-rw-r--r--"))
        same((info.owner, info.group), ("user", "user"))
        assert abs(info.modified_time.timestamp() - time.time()) < 60, info.modified_time
        same(s.files.get_info("/home/user").type, FileType.DIR)
        raises(NotFoundException, s.files.get_info, "nowhere")


@case
def symlinks():
    with sandbox() as s:
        s.commands.run("echo x > target; ln -s target link")
        info = s.files.get_info("link")
        same(info.symlink_target, "/home/user/target")
        same(s.files.read("link"), "x\n")
        names = {e.name for e in s.files.list("/home/user")}
        assert {"target", "link"} <= names, names


@case
def make_dir():
    with sandbox() as s:
        same(s.files.make_dir("a/b/c"), True)
        same(s.files.make_dir("a/b/c"), False)
        same(s.files.get_info("a/b").type, FileType.DIR)


@case
def list_depth():
    with sandbox() as s:
        s.commands.run("mkdir -p tree/one/two/three; touch tree/f tree/one/g")
        names = lambda **o: sorted(e.path for e in s.files.list("tree", **o))  # noqa: E731
        base = "/home/user/tree"
        same(names(), [f"{base}/f", f"{base}/one"])
        same(names(depth=2), [f"{base}/f", f"{base}/one", f"{base}/one/g", f"{base}/one/two"])
        same(len(names(depth=9)), 5)
        types = {e.name: e.type for e in s.files.list("tree")}
        same(types, {"f": FileType.FILE, "one": FileType.DIR})


@case
def list_errors():
    with sandbox() as s:
        s.files.write("f", "x")
        raises(NotFoundException, s.files.list, "nowhere")
        raises(InvalidArgumentException, s.files.list, "f")
        raises(InvalidArgumentException, s.files.list, ".", depth=0)


@case
def rename():
    with sandbox() as s:
        s.files.write("old", "x")
        info = s.files.rename("old", "new")
        same(info.path, "/home/user/new")
        same((s.files.exists("old"), s.files.read("new")), (False, "x"))
        raises(NotFoundException, s.files.rename, "old", "other")


@case
def remove():
    with sandbox() as s:
        s.commands.run("mkdir -p d/e; touch d/e/f g")
        s.files.remove("g")
        s.files.remove("d")
        same((s.files.exists("g"), s.files.exists("d")), (False, False))
        s.files.remove("g")


@case
def other_users():
    with sandbox() as s:
        s.files.write("/root/secret", "x", user="root")
        same(s.files.read("/root/secret", user="root"), "x")
        same(s.commands.run("stat -c %U /root/secret", user="root").stdout, "root\n")
        error = raises(Exception, s.files.read, "f", user="nobody-here")
        assert "nobody-here" in str(error), error


@case
def odd_names():
    with sandbox() as s:
        for name in ("with blank", "žluť 🐎", "a&b=c?d#e%20", "quote'\"q", "plus+plus"):
            s.files.write(name, name)
            same(s.files.read(name), name)
            assert name in [e.name for e in s.files.list(".")], name


@case
def file_metadata():
    with sandbox() as s:
        try:
            s.files.write("m", "x", metadata={"author": "me", "kind": "note"})
        except TypeError:
            raise Absent("no metadata of files")
        info = s.files.get_info("m")
        if not hasattr(info, "metadata"):
            raise Absent("no metadata in EntryInfo")
        same(info.metadata, {"author": "me", "kind": "note"})
        s.files.write("m", "y")
        same(s.files.get_info("m").metadata or {}, {})


def fetch(url: str, data: bytes | None = None, kind: str = "application/octet-stream"):
    request = urllib.request.Request(url, data=data)
    if data is not None:
        request.add_header("Content-Type", kind)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def form(name: str, data: bytes) -> tuple[bytes, str]:
    edge = "edge123"
    body = (
        f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode() + data + f"\r\n--{edge}--\r\n".encode()
    return body, f"multipart/form-data; boundary={edge}"


@case
def signed_download():
    with sandbox() as s:
        s.files.write("f.txt", "signed")
        same(fetch(s.download_url("f.txt", user="user")), (200, b"signed"))
        same(fetch(s.download_url("f.txt", user="user", use_signature_expiration=60)), (200, b"signed"))
        url = s.download_url("f.txt", user="user")
        status, body = fetch(url.replace("f.txt", "g.txt"))
        assert status in (401, 404, 502), (status, body)


@case
def signed_download_expires():
    with sandbox() as s:
        s.files.write("f.txt", "signed")
        url = s.download_url("f.txt", user="user", use_signature_expiration=1)
        time.sleep(2.5)
        status, body = fetch(url)
        same(status, 401)
        assert b"signature is already expired" in body, body


@case
def signed_upload():
    with sandbox() as s:
        url = s.upload_url("up.txt", user="user")
        body, kind = form("up.txt", b"uploaded")
        status, answer = fetch(url, body, kind)
        same(status, 200)
        same(s.files.read("up.txt"), "uploaded")
