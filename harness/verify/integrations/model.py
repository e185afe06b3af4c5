"""Stand-ins for the models of Anthropic and OpenAI: their wire formats, scripted responses, and a list of the requests.

    POST /v1/messages            Anthropic, with and without a stream
    POST /v1/responses           OpenAI's Responses
    POST /v1/chat/completions    OpenAI's Chat Completions, with and without a stream
    GET  /asked                  the requests: path, key, status of each (for the tests)

A request without the key gets 401, as from the real servers.
"""

import http.server
import json
import ssl
import sys
import threading
import uuid

from scripts import Call, answer

KEY = "sk-stand-in-0123456789"
# Conversations of Anthropic's threads, by their last message.
THREADS: dict[str, list[dict]] = {}


def texts_of(content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.get("text", "") for part in content or [] if part.get("type") in ("text", "input_text")]


def choose(messages: list[dict]) -> Call | str:
    prompts = [text for m in messages if m.get("role") == "user" for text in texts_of(m.get("content"))]
    asked = sum(m.get("role") == "assistant" or m.get("type") == "function_call" for m in messages)
    return answer(prompts, asked)


def anthropic(body: dict) -> tuple[dict, list[tuple[str, dict]]]:
    """The whole message, and the events of a stream."""
    # A thread continues from a message that the server has stored, so the request contains only the new part.
    thread = body.get("thread") or {}
    messages = THREADS.get(thread.get("previous_message_id"), []) + body["messages"]
    chosen = choose(messages)
    names = {tool["name"].lower(): tool["name"] for tool in body.get("tools", [])}
    if isinstance(chosen, Call):
        block = {
            "type": "tool_use",
            "id": f"toolu_{uuid.uuid4().hex[:20]}",
            "name": names.get(chosen.tool.lower(), chosen.tool),
            "input": chosen.arguments,
        }
        begin = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(chosen.arguments)}
        reason = "tool_use"
    else:
        block = {"type": "text", "text": chosen}
        begin = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": chosen}
        reason = "end_turn"
    usage = {"input_tokens": 10, "output_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    whole = {
        "id": f"msg_{uuid.uuid4().hex[:20]}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", ""),
        "content": [block],
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": usage,
    }
    THREADS[whole["id"]] = [*messages, {"role": "assistant", "content": [block]}]
    events = [
        ("message_start", {"message": {**whole, "content": [], "stop_reason": None}}),
        ("content_block_start", {"index": 0, "content_block": begin}),
        ("content_block_delta", {"index": 0, "delta": delta}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}),
        ("message_stop", {}),
    ]
    return whole, [(name, {"type": name, **data}) for name, data in events]


def responses(body: dict) -> dict:
    given = body["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    chosen = choose(messages)
    if isinstance(chosen, Call):
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": chosen.tool,
            "arguments": json.dumps(chosen.arguments),
            "status": "completed",
        }
    else:
        item = {
            "type": "message",
            "id": f"msg_{uuid.uuid4().hex}",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": chosen, "annotations": []}],
        }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": body.get("model", ""),
        "output": [item],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": body.get("tools", []),
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 10,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 20,
        },
    }


def completions(body: dict) -> dict:
    chosen = choose(body["messages"])
    if isinstance(chosen, Call):
        call = {"name": chosen.tool, "arguments": json.dumps(chosen.arguments)}
        calls = [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        reason = "tool_calls"
    else:
        message = {"role": "assistant", "content": chosen}
        reason = "stop"
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
    }


class Stand(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[dict] = []
    lock = threading.Lock()

    def log_message(self, *_):
        pass

    def key(self) -> str:
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.headers.get("x-api-key") or bearer

    def send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        with self.lock:
            self.asked.append({"path": self.path, "key": self.key(), "status": status})
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/asked":
            with self.lock:
                body = json.dumps(self.asked).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send(404, b'{"type":"error","error":{"type":"not_found_error","message":"no such route"}}')

    do_HEAD = do_GET

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.key() != KEY:
            return self.send(401, b'{"type":"error","error":{"type":"authentication_error","message":"invalid x-api-key"}}')
        path = self.path.split("?")[0]
        try:
            body = json.loads(raw)
        except ValueError:
            return self.send(400, b'{"type":"error","error":{"type":"invalid_request_error","message":"no JSON"}}')
        if path == "/v1/messages":
            whole, events = anthropic(body)
            if body.get("stream"):
                text = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
                return self.send(200, text.encode(), "text/event-stream")
            return self.send(200, json.dumps(whole).encode())
        if path == "/v1/messages/count_tokens":
            return self.send(200, b'{"input_tokens": 10}')
        if path == "/v1/responses":
            return self.send(200, json.dumps(responses(body)).encode())
        if path == "/v1/chat/completions":
            return self.send(200, json.dumps(completions(body)).encode())
        return self.send(404, b'{"error":{"message":"no such route"}}')


def serve(address: str, port: int, certificate: str | None = None) -> http.server.ThreadingHTTPServer:
    """Serves on a thread. `certificate`: a PEM file with key and chain."""
    server = http.server.ThreadingHTTPServer((address, port), Stand)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    # model.py ADDRESS PORT [CERTIFICATE]
    serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    print(f"export OPENAI_BASE_URL=http://{sys.argv[1]}:{sys.argv[2]}/v1 OPENAI_API_KEY={KEY}", flush=True)
    threading.Event().wait()
