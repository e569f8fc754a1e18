"""Where the ranks of one model copy meet: what a launcher makes and each rank is given.

An endpoint is a short text and, on one host, one memory file that child processes inherit:

    shm:<fd>:<nonce>        shared memory in the file itself
    gloo:<fd>               gloo, its store in the file
    gloo:tcp://host:port    gloo, its store at rank 0 (any hosts); also file:///path and env://

The launcher calls `make_endpoint` once, lets every rank inherit the file and gives it the
text in its arguments, and closes its own end; a rank calls `worlds.open_world`. Nothing has a name
in the file system, so nothing is left after a kill. Knows no torch, as launchers need none.
"""

import importlib.util
import os
import secrets
from dataclasses import dataclass

EXTENSION = "anabranch.comm.shm._shm"
FILE = "anabranch-ranks"
KINDS = ("shm", "gloo")


@dataclass(frozen=True)
class Endpoint:
    """text: for every rank. fds: files that every rank must inherit under the same numbers."""

    text: str
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """The launcher's own end; ranks keep theirs."""
        for fd in self.fds:
            os.close(fd)


def choose_transport(asked: str) -> str:
    """`shm` or `gloo` for ranks of one host. ValueError when shm is asked for and not built."""
    built = importlib.util.find_spec(EXTENSION) is not None
    if asked == "auto":
        return "shm" if built else "gloo"
    if asked not in KINDS:
        raise ValueError(f"transport {asked!r}; one of auto, {', '.join(KINDS)}")
    if asked == "shm" and not built:
        raise ValueError(
            "transport shm: anabranch was installed without a C++ compiler; install one and "
            "reinstall, or use --transport gloo"
        )
    return asked


def make_endpoint(asked: str = "auto") -> Endpoint:
    """The endpoint of one model copy whose ranks are all children of this process."""
    kind = choose_transport(asked)
    fd = os.memfd_create(FILE, os.MFD_CLOEXEC)
    if kind == "gloo":
        return Endpoint(f"gloo:{fd}", (fd,))
    return Endpoint(f"shm:{fd}:{secrets.token_hex(16)}", (fd,))
