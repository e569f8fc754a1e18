"""Starting and ending the processes of the tree. No torch, no messages: descriptors and signals.

The front starts the brain as `python -m anabranch.engine.main CHANNEL PULSE [MODULE]`; the brain
forks the ranks, so that what takes long to load is loaded once a host. Every child asks the kernel
to be killed when its parent dies, and belongs to the brain's process group: one signal ends the
whole tree.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def spawn(channel: socket.socket, pulse_fd: int, preload: str = "") -> "subprocess.Popen[bytes]":
    """Start a brain, in a process group of its own, with its end of the channel and the pulse page.

    It finds modules where this process does. preload: a module it loads before its launch comes,
    for which it then waits longer. The thread that calls this must outlive the child: the kernel
    takes a thread's end for the parent's.
    """
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    passed = (channel.fileno(), pulse_fd)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "anabranch.engine.main",
            *map(str, passed),
            *filter(None, [preload]),
        ],
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def fork(born: Callable[[], None]) -> ForkProcess:
    """A child that runs `born` and ends; it has every descriptor of this process.

    For a process whose only thread is the caller's, which must outlive the child.
    """
    process = multiprocessing.get_context("fork").Process(target=born)
    process.start()
    return process


def die_with_parent(parent: int) -> None:
    """Be killed when `parent` ends; exits at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def keep_memory() -> None:
    """Have the C library keep what is freed: each step wants what the last one gave back, and pages
    fresh from the system cost more than the sums on them. Nothing where it has no such switch."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def kill_group(leader: int) -> None:
    """Kill every process of the tree, stopped ones too. Nothing happens if it is gone already."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def how_it_ended(code: int) -> str:
    """An exit code in words: negative for a signal, as subprocess and multiprocessing have it."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
