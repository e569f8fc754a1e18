"""An engine process that starts before it is known what it will run.

Loading torch takes longer than all else in a start, and needs a core of its own. A command that is
going to serve starts the process first: it loads what runs ranks while the command loads its own
modules and reads the checkpoint's facts. Imports next to nothing, for the same reason.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anabranch.engine.processes import kill_group, spawn
from anabranch.engine.pulse import Pulse

RANKS_MODULE = "anabranch.engine.ranks"


@dataclass(frozen=True)
class Early:
    """A process that waits for its launch at the other end of `channel`."""

    channel: socket.socket
    pulse: Pulse
    process: "subprocess.Popen[bytes]"


@contextmanager
def early_engine(slots: int) -> Iterator[Early | None]:
    """The process, killed with the block if it still runs then; None on a rank of torchrun's.

    slots: processes of the tree. The thread that enters must outlive the process.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        yield None
        return
    pulse = Pulse.create(max(1, slots))
    mine, theirs = socket.socketpair()
    with theirs:
        process = spawn(theirs, pulse.fd, preload=RANKS_MODULE)
    try:
        yield Early(mine, pulse, process)
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            process.wait()
