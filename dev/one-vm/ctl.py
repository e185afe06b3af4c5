"""ctl.py SOCKET < calls: sends each line, a call in JSON, to a VMM, with the files that follow `@` as ROLE=PATH."""
import json, os, socket, struct, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
def opened(role, path):
    if role == "vsock":
        v = socket.socket(socket.AF_UNIX); v.bind(path); v.listen(); return v.detach()
    if role == "scratch": return os.open(path, os.O_TMPFILE | os.O_RDWR, 0o600)
    flags = {"kvm": os.O_RDWR, "console": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}
    return os.open(path, flags.get(role, os.O_RDONLY), 0o600)
for line in sys.stdin:
    request, _, words = line.partition("@")
    files = [w.split("=", 1) for w in words.split()]
    fds = [opened(role, path) for role, path in files]
    names = [{k: v} if (k := r.partition(".")[0]) != (v := r.rpartition(".")[2]) else r for r, _ in files]
    body = json.dumps({"request": json.loads(request), "files": names}).encode()
    socket.send_fds(s, [b"CVMC" + struct.pack("<HHI", 2, 0, len(body)) + body], fds)
    *_, n = struct.unpack("<4sHHI", s.recv(12, socket.MSG_WAITALL))
    print(s.recv(n, socket.MSG_WAITALL).decode(), flush=True)
