"""agent.py VSOCKET: asks the agent of a guest for its health."""
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
s.sendall(b"CONNECT 49983\n"); print(s.recv(64))
s.sendall(b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"); print(s.recv(4096))
