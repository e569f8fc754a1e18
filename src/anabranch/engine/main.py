"""What a process of the tree runs: `python -m anabranch.engine.main CHANNEL PULSE [MODULE]`.

It is the brain (slot 0: scheduler, rank 0, and the parent of the other ranks, which it forks). A
process ends with status 0 when the channel's other end says so or is gone, and with 1 after telling
why in the pulse page and on the channel.
"""

import gc
import os
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from typing import NoReturn

from anabranch.core.messages import Fatal
from anabranch.engine.brain import Brain
from anabranch.engine.crew import Crew, LocalCrew, describe, load_maker
from anabranch.engine.loop import Loop
from anabranch.engine.processes import die_with_parent, keep_memory, kill_group
from anabranch.engine.protocol import (
    FROM_BRAIN,
    FROM_RANK,
    TO_BRAIN,
    Launch,
    Loaded,
)
from anabranch.engine.pulse import Beat, Pulse, name_of
from anabranch.engine.rank import IDLE_SECONDS, follow
from anabranch.engine.remote import MEETING, RemoteRanks
from anabranch.engine.tree import LOOK_ELSEWHERE, ChildRanks, TreeCrew
from anabranch.wire import Channel
from anabranch.wire.ring import Ring, RingReader

START_SECONDS = 60.0
FETCH_SECONDS = 3600.0  # for a process that was started early: the model may have to be fetched
GRACE_SECONDS = 4.0  # after a failure, before the tree kills itself; the front is quicker


class _Watch:
    """Ends this process when its parent is gone, and the tree when a failure was reported."""

    def __init__(self, pulse: Pulse, parent: int, brain: bool) -> None:
        self._pulse, self._parent, self._brain = pulse, parent, brain
        self.ranks: ChildRanks | None = None
        self.loaded = False  # the model is; what fails before may be the fault of its files
        self._failed_at: float | None = None

    def __call__(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)
        if not self._brain:
            return
        if self.ranks is not None:
            self.ranks.watch()
        if self._pulse.failure() is None:
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now - self._failed_at > GRACE_SECONDS:
            kill_group(os.getpgrp())


def _start_collecting() -> None:
    """What was loaded so far lives as long as the process: no collection need look at it."""
    gc.freeze()
    gc.enable()


def run_brain(launch: Launch, channel: Channel, pulse: Pulse, watch: _Watch) -> None:
    """Build the crew, say Ready, serve until told to end."""
    run = launch.run
    crew: Crew
    if watch.ranks is not None:
        crew = TreeCrew(launch, watch.ranks)
    elif launch.endpoint.meeting == MEETING:
        crew = TreeCrew(launch, RemoteRanks(launch))
    else:
        crew = LocalCrew(run, launch.path, launch.maker, launch.endpoint)
    brain = Brain(run, crew)
    watch.loaded = True
    _start_collecting()
    channel.send(FROM_BRAIN.encode(brain.ready))
    Loop(brain, channel, pulse).run()
    brain.close()


def run_rank(launch: Launch, channel: Channel, pulse: Pulse, watch: _Watch) -> None:
    """Build one worker and obey until the brain says farewell or is gone."""
    (rank,) = launch.endpoint.ranks
    worker = load_maker(launch.maker, launch.run, launch.path, launch.endpoint).make(rank)
    watch.loaded = True
    _start_collecting()
    channel.send(FROM_RANK.encode(Loaded(rank)))
    orders = RingReader(Ring(launch.plans), rank - 1)

    def take() -> bytes | None:
        frame = orders.take(IDLE_SECONDS)
        return channel.recv(START_SECONDS) if frame == LOOK_ELSEWHERE else frame

    follow(worker, take, channel, pulse, launch.slot)


def fork_ranks(launch: Launch, channel: Channel, pulse: Pulse) -> ChildRanks | None:
    """The other ranks if they are to be children of this process; what they run is loaded first."""
    world = launch.run.layout.mesh.world
    if len(launch.endpoint.ranks) == world or launch.endpoint.meeting == MEETING:
        return None
    import_module(launch.maker.partition(":")[0])
    parent = os.getpid()

    def live(mine: Launch, orders: Channel) -> None:
        die_with_parent(parent)
        leave(serve(mine, orders, pulse, parent))

    return ChildRanks(launch, pulse, live, channel)


def serve(launch: Launch, channel: Channel, pulse: Pulse, parent: int) -> int:
    """Be the brain (slot 0) or a rank until the end; the exit status."""
    watch = _Watch(pulse, parent, brain=launch.slot == 0)
    try:
        if launch.slot == 0:
            watch.ranks = fork_ranks(launch, channel, pulse)
        if launch.mask:
            os.sched_setaffinity(0, launch.mask)
        Beat(pulse, launch.slot, watch).start()
        if launch.slot == 0:
            run_brain(launch, channel, pulse, watch)
        else:
            run_rank(launch, channel, pulse, watch)
    except BaseException as error:
        # a checkpoint that cannot be loaded is told in one line, as the command line does it
        told = isinstance(error, ValueError | OSError) and not watch.loaded
        if not told or os.environ.get("ANABRANCH_TRACEBACK"):
            traceback.print_exc()
        message = str(error) if told else f"{name_of(launch.slot)}: {describe(error)}"
        pulse.fail(message)
        schema = FROM_BRAIN if launch.slot == 0 else FROM_RANK
        channel.send(schema.encode(Fatal(pulse.failure() or message)))
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End now: threads of torch and of ranks need not agree to it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(channel_fd: int, pulse_fd: int, preload: str = "") -> int:
    gc.disable()  # while modules and weights are loaded, which leaves nothing to collect
    parent = os.getppid()
    die_with_parent(parent)
    keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's ^C is the front's to act on
    channel = Channel(socket.socket(fileno=channel_fd))
    pulse = Pulse(pulse_fd)
    if preload:
        import_module(preload)
    launch = TO_BRAIN.decode(channel.recv(FETCH_SECONDS if preload else START_SECONDS))
    assert isinstance(launch, Launch), f"{type(launch).__name__} before the launch"
    return serve(launch, channel, pulse, parent)


if __name__ == "__main__":
    leave(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
