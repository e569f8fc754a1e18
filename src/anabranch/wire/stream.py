"""The asyncio end of a channel, for the front process. The same frames as channel.py."""

import asyncio
import socket
import struct

from anabranch.wire.codec import MAX_FRAME, WireError

_HEADER = struct.Struct("<I")


class AsyncChannel:
    """Frames over asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def open(sock: socket.socket) -> "AsyncChannel":
        """Wrap a connected unix socket."""
        return AsyncChannel(*await asyncio.open_unix_connection(sock=sock))

    def send(self, frame: bytes) -> None:
        """Queue a frame; it is sent in the background. ConnectionError if the peer is gone."""
        if self._writer.is_closing():
            raise ConnectionError("the peer is gone")
        self._writer.write(_HEADER.pack(len(frame)) + frame)

    async def recv(self) -> bytes:
        """The next frame; ConnectionError at the peer's end."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes is announced; at most {MAX_FRAME}")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            raise ConnectionError("the peer is gone") from None

    def close(self) -> None:
        self._writer.close()
