"""A ring of frames in shared memory: one writer, several readers that all read every frame.

The brain's plans go to all ranks of a host as the same bytes, written once and announced by one
futex call. The memory is a file without a name, inherited by the readers' processes.

Protocol: the writer fills a frame's bytes and its index entry (offset, length, CRC), then raises
the count of frames and wakes. A reader takes frame n once the count is above n, and then raises its
own count, which lets the writer reuse the space. Python cannot order its stores on weakly ordered
processors, so a reader trusts a frame only when its CRC fits, and looks again otherwise.
"""

import ctypes
import mmap
import os
import platform
import time
from zlib import crc32

_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]  # Linux system call numbers
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
_SLOTS = 64  # frames that may be unread
_WORDS = 8 + 3 * _SLOTS  # count; then offset, length and CRC of each slot; then readers' counts
SPIN_SECONDS = 50e-6  # how long a reader looks before it sleeps


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Ring:
    """The memory. `create` in the writer's process, `Ring(fd)` in a reader's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = memoryview(self._map).cast("Q")
        self.readers, self.capacity = self._words[1], self._words[2]
        self._data = 8 * (_WORDS + self.readers)
        self._futex = ctypes.c_uint32.from_buffer(self._map)  # the low half of the count
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    @classmethod
    def create(cls, readers: int, capacity: int = 4 << 20) -> "Ring":
        """capacity: bytes of frames that may be unread; a frame may have half of them."""
        fd = os.memfd_create("anabranch-plans", 0)
        size = 8 * (_WORDS + readers) + capacity
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            memory[8:24] = readers.to_bytes(8, "little") + capacity.to_bytes(8, "little")
        return cls(fd)

    @property
    def longest(self) -> int:
        """Most bytes a frame may have."""
        return self.capacity // 2

    @property
    def count(self) -> int:
        return self._words[0]

    def consumed(self, reader: int) -> int:
        return self._words[_WORDS + reader]

    def consume(self, reader: int, count: int) -> None:
        self._words[_WORDS + reader] = count

    def write(self, number: int, offset: int, frame: bytes) -> None:
        """Fill frame `number`; `announce` makes it visible."""
        self._map[self._data + offset : self._data + offset + len(frame)] = frame
        slot = 8 + 3 * (number % _SLOTS)
        self._words[slot] = offset
        self._words[slot + 1] = len(frame)
        self._words[slot + 2] = crc32(frame, number & 0xFFFFFFFF)

    def announce(self, count: int) -> None:
        self._words[0] = count
        self._call(_WAKE, _EVERYONE, None)

    def read(self, number: int) -> bytes | None:
        """Frame `number`, or None while its bytes are not all visible yet."""
        slot = 8 + 3 * (number % _SLOTS)
        offset, length, crc = (self._words[slot + i] for i in range(3))
        start = self._data + offset
        frame = self._map[start : start + length]
        return frame if crc32(frame, number & 0xFFFFFFFF) == crc else None

    def sleep(self, count: int, seconds: float) -> None:
        """Until the count is no longer `count`, a while has passed, or for no reason at all."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._call(_WAIT, count & 0xFFFFFFFF, ctypes.byref(limit))

    def _call(self, operation: int, value: int, limit: "ctypes._CArgObject | None") -> None:
        # its result is of no use: every caller looks at the count again
        self._syscall(_FUTEX, ctypes.byref(self._futex), operation, value, limit, None, 0)

    def close(self) -> None:
        del self._futex
        self._words.release()
        self._map.close()
        os.close(self.fd)


class RingWriter:
    """The writing end; one per ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._begins: list[int] = []  # absolute begins of frames, the oldest maybe unread first
        self._first = 0  # number of the oldest
        self._head = 0  # absolute end of the newest

    def publish(self, frame: bytes, timeout: float) -> None:
        """Write a frame for all readers. TimeoutError if one of them does not make room in time."""
        ring = self._ring
        assert len(frame) <= ring.longest, f"{len(frame)} bytes; a frame may have {ring.longest}"
        begin = self._head
        room = ring.capacity - begin % ring.capacity
        if room < len(frame):
            begin += room  # frames do not wrap
        deadline = time.monotonic() + timeout
        while not self._fits(begin + len(frame)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"reader {self._slowest()} read no plan for {timeout:g} s")
            time.sleep(50e-6)
        number = ring.count
        ring.write(number, begin % ring.capacity, frame)
        ring.announce(number + 1)
        self._begins.append(begin)
        self._head = begin + len(frame)

    def _fits(self, end: int) -> bool:
        consumed = min(self._ring.consumed(r) for r in range(self._ring.readers))
        del self._begins[: consumed - self._first]
        self._first = consumed
        if len(self._begins) >= _SLOTS:
            return False
        return not self._begins or end - self._begins[0] <= self._ring.capacity

    def _slowest(self) -> int:
        return min(range(self._ring.readers), key=self._ring.consumed)


class RingReader:
    """The end of reader `index`."""

    def __init__(self, ring: Ring, index: int) -> None:
        assert 0 <= index < ring.readers, f"reader {index} of {ring.readers}"
        self._ring, self._index = ring, index
        self._next = ring.consumed(index)

    def take(self, timeout: float) -> bytes | None:
        """The next frame, or None after `timeout` seconds."""
        now = time.monotonic()
        deadline, spin = now + timeout, now + SPIN_SECONDS
        while True:
            count = self._ring.count
            if count > self._next and (frame := self._ring.read(self._next)) is not None:
                self._next += 1
                self._ring.consume(self._index, self._next)
                return frame
            now = time.monotonic()
            if now >= deadline:
                return None
            if now >= spin and count == self._next:
                self._ring.sleep(count, deadline - now)
