"""Frames over a stream socket: four bytes of length, then the message.

One object serves a thread that polls (`send`, `receive`, `wait`: never blocks longer than asked)
and one that waits (`recv`, always with a deadline). Carries bytes; knows nothing of their meaning.
"""

import select
import socket
import struct
import time
from collections import deque

from anabranch.wire.codec import MAX_FRAME, WireError

_HEADER = struct.Struct("<I")
_READ = 1 << 18


class Channel:
    """One end. Not for use by two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._frames: deque[bytes] = deque()
        self.closed = False

    @staticmethod
    def pair() -> tuple["Channel", "Channel"]:
        left, right = socket.socketpair()
        return Channel(left), Channel(right)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return sum(len(part) for part in self._out)

    def send(self, *frames: bytes) -> None:
        """Queue frames and send what the peer takes now; `flush` or `wait` send the rest."""
        for frame in frames:
            if len(frame) > MAX_FRAME:
                raise WireError(f"a message of {len(frame)} bytes; at most {MAX_FRAME} travel")
            self._out.append(memoryview(_HEADER.pack(len(frame)) + frame))
        self._push()

    def flush(self, timeout: float) -> None:
        """Send everything queued. TimeoutError past `timeout` seconds, ConnectionError if gone."""
        deadline = time.monotonic() + timeout
        while self._out:
            if self.closed:
                raise ConnectionError("the peer is gone")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the peer took nothing for {timeout:g} s")
            select.select([], [self._sock], [], left)
            self._push()

    def receive(self) -> list[bytes]:
        """Every frame that has arrived whole; does not wait. Sets `closed` at the peer's end."""
        self._pull()
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def recv(self, timeout: float) -> bytes:
        """The next frame. TimeoutError past `timeout` s, ConnectionError if the peer is gone."""
        deadline = time.monotonic() + timeout
        while not self._frames:
            if self.closed:
                raise ConnectionError("the peer is gone")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no message within {timeout:g} s")
            self.wait(left)
            self._pull()
        return self._frames.popleft()

    def wait(self, timeout: float | None, *others: int) -> None:
        """Block until something can be read here or on the descriptors `others`, or `timeout`."""
        if self._frames or self.closed:
            return
        poller = select.poll()
        events = select.POLLIN | (select.POLLOUT if self._out else 0)
        poller.register(self._sock, events)
        for fd in others:
            poller.register(fd, select.POLLIN)
        poller.poll(None if timeout is None else max(0.0, timeout) * 1e3)
        self._push()

    def close(self) -> None:
        self.closed = True
        self._sock.close()

    def _push(self) -> None:
        while self._out and not self.closed:
            try:
                sent = self._sock.send(self._out[0])
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            rest = self._out[0][sent:]
            if rest:
                self._out[0] = rest
            else:
                self._out.popleft()

    def _pull(self) -> None:
        while not self.closed:
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self._in += data
        self._split()

    def _split(self) -> None:
        start = 0
        while len(self._in) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._in, start)
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes is announced; at most {MAX_FRAME}")
            end = start + _HEADER.size + length
            if end > len(self._in):
                break
            self._frames.append(bytes(self._in[start + _HEADER.size : end]))
            start = end
        del self._in[:start]
