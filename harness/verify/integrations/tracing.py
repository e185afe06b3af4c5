"""Traces of a create and of a request to a program in the sandbox, through a real collector (rotel), decoded with the published
messages of OpenTelemetry."""

import gzip
import http.server
import json
import os
import pathlib
import socket
import subprocess
import threading
import time
import urllib.request

import rotel
from e2b import Sandbox
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

COLLECTOR, RECEIVER = 4318, 4319
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ECHO = """
import http.server
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.headers.get("traceparent", "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", 8000), Echo).serve_forever()
"""
spans: list[dict] = []


class Receiver(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    spans.append({
                        "service": names["service.name"], "name": span.name, "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(), "parent": span.parent_span_id.hex(),
                        "ns": span.end_time_unix_nano - span.start_time_unix_nano, "events": [e.name for e in span.events],
                    })  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def until(what: str, condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: {spans}")
        time.sleep(0.1)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


def call(url: str, headers: dict, body: dict | None = None) -> bytes:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"X-API-Key": os.environ["E2B_API_KEY"], "Content-Type": "application/json", **headers}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return answer.read()


receiver = http.server.ThreadingHTTPServer(("127.0.0.1", RECEIVER), Receiver)
threading.Thread(target=receiver.serve_forever, daemon=True).start()
agent = pathlib.Path(rotel.__file__).parent / "rotel-agent"
words = [agent, "start", "--otlp-http-endpoint", f"127.0.0.1:{COLLECTOR}", "--otlp-grpc-endpoint", "127.0.0.1:4317",
         "--exporter", "otlp", "--otlp-exporter-endpoint", f"http://127.0.0.1:{RECEIVER}", "--otlp-exporter-protocol", "http"]  # fmt: skip
collector = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    until("the collector", lambda: answers(COLLECTOR))
    given = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    made = json.loads(call(f"{os.environ['E2B_API_URL']}/v2/sandboxes", given, {"templateID": "base", "timeout": 60}))
    with Sandbox.connect(made["sandboxID"]) as sandbox:
        sandbox.files.write("/tmp/echo.py", ECHO)
        sandbox.commands.run("python3 /tmp/echo.py", background=True)
        place = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000", **given}

        def echoed() -> str:
            try:
                return call(os.environ["E2B_SANDBOX_URL"], place).decode()
            except OSError:
                return ""

        until("the program in the sandbox", echoed)
        passed = echoed().split("-")
        off = {**place, "traceparent": f"00-{TRACE}-{PARENT}-00"}
        kept = call(os.environ["E2B_SANDBOX_URL"], off).decode()
    of_trace = lambda: {(s["service"], s["name"]): s for s in spans if s["trace"] == TRACE}
    until("the spans", lambda: len(of_trace()) >= 5)
    found = of_trace()
finally:
    collector.terminate()
    collector.wait()

create = found["cube-api", "POST /v2/sandboxes"]
start, restore, identity = (found[s] for s in [("cube-pool", "start"), ("cube-vmm", "restore"), ("cube-agent", "identity")])
print("create is a child of the client's span:", create["parent"] == PARENT)
print("start of create:", start["parent"] == create["id"])
print("restore and identity of start:", restore["parent"] == identity["parent"] == start["id"])
print("durations:", 0 < identity["ns"] <= start["ns"] <= create["ns"])
print("phases:", {"process_started", "jailed", "memory_mapped", "resumed"} <= set(restore["events"]))
inside = [s for s in spans if s["id"] == passed[2]]
print("the program got the trace, with a span of the proxy:", passed[1] == TRACE, inside[0]["name"], inside[0]["parent"] == PARENT)
print("not sampled, so not touched:", kept == off["traceparent"])

# Prints:
# create is a child of the client's span: True
# start of create: True
# restore and identity of start: True
# durations: True
# phases: True
# the program got the trace, with a span of the proxy: True GET sandbox True
# not sampled, so not touched: True
