"""A tiny OpenAI-like server with set answers, for the commands that drive any server."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, dict], dict]


@contextmanager
def serving(answer: Answer, owner: str = "somebody") -> Iterator[tuple[str, list[dict]]]:
    """URL and the bodies received. answer: (path, body) -> JSON reply; {"status": n} refuses."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "stub", "owned_by": owner}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self.reply(answer(self.path, body))

        def reply(self, value: dict) -> None:
            data = json.dumps(value).encode()
            self.send_response(value.get("status", 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # the clients connect all at once

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def chat_reply(text: str) -> dict:
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }


def completion_reply(text: str) -> dict:
    return {
        "choices": [{"index": 0, "text": text}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
