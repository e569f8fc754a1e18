"""Signs of life of a process tree in one shared page: who lives, who steps, why it ended.

A memory file that every process of the tree maps. Each process has a line with its pid, the time it
last stamped (twice a second, from a thread that otherwise sleeps) and the step it is in; the head
holds the first failure anyone reports. Times are CLOCK_MONOTONIC, the same for a host's processes.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_HEAD = 1024  # bytes: length of the failure text, then the text
_LINE = 64  # bytes: pid, last stamp, begin of the step under way (0: none), its number
BEAT_SECONDS = 0.5
STALE_SECONDS = 2.0  # without a stamp for this long, the kernel is asked what became of a process
HUNG_SECONDS = 60.0  # one that still runs may be silent for longer: a library holds the interpreter
STEP_SECONDS = 600.0  # longest step of a healthy engine


class Pulse:
    """The page. `create` in the process that starts the tree, `Pulse(fd)` in all others."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._bytes = mmap.mmap(fd, size)
        self._words = memoryview(self._bytes).cast("Q")
        self.slots = (size - _HEAD) // _LINE

    @classmethod
    def create(cls, slots: int) -> "Pulse":
        fd = os.memfd_create("anabranch-pulse", 0)
        os.ftruncate(fd, _HEAD + slots * _LINE)
        return cls(fd)

    def stamp(self, slot: int) -> None:
        line = self._line(slot)
        self._words[line + 1] = time.monotonic_ns()
        self._words[line] = os.getpid()  # last: a pid is judged by the stamp beside it

    def begin_step(self, slot: int, number: int) -> None:
        line = self._line(slot)
        self._words[line + 3] = number
        self._words[line + 2] = time.monotonic_ns()

    def end_step(self, slot: int) -> None:
        self._words[self._line(slot) + 2] = 0

    def fail(self, message: str) -> None:
        """Report why the tree must end; the first report stands."""
        if self._words[0] == 0:
            text = message.encode()[: _HEAD - 8]
            self._bytes[8 : 8 + len(text)] = text
            self._words[0] = len(text)

    def failure(self) -> str | None:
        length = self._words[0]
        return self._bytes[8 : 8 + length].decode(errors="replace") if length else None

    def problem(self, step: float = STEP_SECONDS) -> str | None:
        """What is wrong with the tree now, or None. Processes that never stamped are not judged."""
        if (failure := self.failure()) is not None:
            return failure
        now = time.monotonic_ns()
        for slot in range(self.slots):
            line = self._line(slot)
            pid, seen, begun, number = (self._words[line + i] for i in range(4))
            silent = (now - seen) / 1e9
            stale = pid and seen and silent > STALE_SECONDS
            if stale and (silent > HUNG_SECONDS or not _runs(pid)):
                return f"{name_of(slot)} (pid {pid}) is dead or stopped: silent for {silent:.1f} s"
            if pid and begun and now - begun > step * 1e9:
                return f"{name_of(slot)} (pid {pid}) is stuck in step {number} for over {step:g} s"
        return None

    def pids(self) -> list[int]:
        return [pid for s in range(self.slots) if (pid := self._words[self._line(s)])]

    def close(self) -> None:
        self._words.release()
        self._bytes.close()
        os.close(self.fd)

    def _line(self, slot: int) -> int:
        return (_HEAD + slot * _LINE) // 8


def _runs(pid: int) -> bool:
    """Not gone, not a zombie, not stopped (proc(5))."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "TtZXx"


def name_of(slot: int) -> str:
    return "the brain" if slot == 0 else f"rank {slot}"


class Beat(threading.Thread):
    """The thread that stamps; `watch` is called after every stamp."""

    def __init__(self, pulse: Pulse, slot: int, watch: Callable[[], None]) -> None:
        super().__init__(name="pulse", daemon=True)
        self._pulse, self._slot, self._watch = pulse, slot, watch
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self._pulse.stamp(self._slot)
            self._watch()
            self._over.wait(BEAT_SECONDS)

    def stop(self) -> None:
        self._over.set()
        self.join()
