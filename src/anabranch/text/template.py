"""Chat messages to prompt text, by the checkpoint's Jinja template.

Owns the child process that renders (see `render`): it is started on first use, ended and replaced
when a template runs past its limits, and gone with the parent. Knows nothing of HTTP or token ids.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.text.tokenizer import Json, Tokenizer

_REPLY_SECONDS = 20.0
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class TemplateError(ValueError):
    """The template refused the messages, or ran past its limits."""


class ChatTemplate:
    """One template; `render` may be called from several threads, one rendering runs at a time."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special = dict(special_tokens)
        self._lock = threading.Lock()
        self._child: _Child | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: str | Path | None = None) -> "ChatTemplate | None":
        """The template in `file`, or the checkpoint's own, or None if there is neither."""
        source = Path(file).read_text(encoding="utf-8") if file else tokenizer.chat_template
        return None if source is None else cls(source, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Json] | None = None,
    ) -> str:
        """Prompt text. TemplateError if the template raises, loops or outgrows its limits.

        variables: further names the template sees (for example enable_thinking).
        """
        values: dict[str, object] = dict(self._special)
        for name, value in (variables or {}).items():
            if name in _RESERVED or name in self._special:
                raise TemplateError(f"{name!r} cannot be set as a template variable")
            values[name] = value
        values["messages"] = list(messages)
        values["tools"] = None if tools is None else list(tools)
        values["documents"] = None
        values["add_generation_prompt"] = add_generation_prompt
        line = json.dumps(values)
        with self._lock:
            try:
                if self._child is None:
                    self._child = _Child(self.source)
                return self._child.ask(line)
            except OSError:
                self._drop()
                raise TemplateError(
                    "the chat template ran past its limits of time and memory; "
                    "give another with --chat-template, or use /v1/completions"
                ) from None

    def close(self) -> None:
        """End the child. A later `render` starts another."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    """A running `render` process. OSError from `ask` means: it is gone or stuck."""

    def __init__(self, source: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        with theirs:
            # -P: the script's own folder must not shadow the standard library
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("render.py"))],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        try:
            self.ask(json.dumps(source))
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> str:
        self._socket.settimeout(_REPLY_SECONDS)
        self._socket.sendall(line.encode() + b"\n")
        deadline = time.monotonic() + _REPLY_SECONDS
        while not self._buffer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionError
            self._buffer += data
        reply, self._buffer = json.loads(self._buffer), b""
        if "error" in reply:
            raise TemplateError(f"chat template: {reply['error']}")
        return str(reply["text"])

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
