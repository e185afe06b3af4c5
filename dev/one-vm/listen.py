"""listen.py PATH PROGRAM...: runs a program with a listening Unix socket as its standard input."""
import os, socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()
os.dup2(s.fileno(), 0); os.execvp(sys.argv[2], sys.argv[2:])
