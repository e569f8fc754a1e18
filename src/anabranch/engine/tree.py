"""Ranks as processes: the brain's process holds rank 0, its children the others.

`TreeCrew` gives every rank the same bytes through a ring and takes the results of the ranks that
lead a replica through their channels. Owns the children's life as seen from the brain; liveness is
pulse.py's.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from anabranch.comm.endpoint import make_endpoint
from anabranch.core.messages import Fatal
from anabranch.core.plan import ReplicaResult, StepPlan, StepResult
from anabranch.engine.crew import LocalCrew, StepFailed
from anabranch.engine.processes import fork, how_it_ended
from anabranch.engine.protocol import (
    FROM_RANK,
    TO_RANK,
    Control,
    ControlReply,
    Endpoint,
    Launch,
    Loaded,
)
from anabranch.engine.pulse import STEP_SECONDS, Pulse
from anabranch.engine.rank import FAREWELL
from anabranch.wire import Channel
from anabranch.wire.ring import Ring, RingWriter

T = TypeVar("T")
LOAD_SECONDS = 3600.0
END_SECONDS = 5.0
LOOK_ELSEWHERE = b"@"  # in the ring: the order is too long for it and comes through the channel


class Member:
    """A rank behind a channel."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank, self.channel = rank, channel

    def expect(self, kind: type[T], timeout: float) -> T:
        """Its next message; StepFailed if it failed, is gone or silent."""
        try:
            message = FROM_RANK.decode(self.channel.recv(timeout))
        except (ConnectionError, TimeoutError) as error:
            raise StepFailed(f"rank {self.rank}: {error}") from None
        if isinstance(message, Fatal):
            raise StepFailed(message.message)
        assert isinstance(message, kind), f"{type(message).__name__}, wanted {kind.__name__}"
        return message


Life = Callable[[Launch, Channel], None]
"""What a rank's process does from its birth to its end."""


class _Child(Member):
    """A rank process of this one."""

    def __init__(self, launch: Launch, live: Life, ours: Sequence[Channel]) -> None:
        mine, theirs = Channel.pair()
        super().__init__(launch.slot, mine)

        def born() -> None:
            for channel in (*ours, mine):  # else the brain's end would outlive the brain
                channel.close()
            live(launch, theirs)

        self.process = fork(born)
        theirs.close()

    def end(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


class Others(Protocol):
    """All ranks but the first. endpoint: how the first one meets them."""

    endpoint: Endpoint

    @property
    def members(self) -> Sequence[Member]: ...

    def order(self, message: StepPlan | Control) -> None:
        """The same order to every rank."""
        ...

    def close(self) -> None: ...


class ChildRanks:
    """Ranks as children of this process, forked from it: what it has loaded is theirs as well.

    Made while this process has no thread but the main one and no device in use. live: what a child
    runs; ours: channels of this process that no child may keep.
    """

    def __init__(self, launch: Launch, pulse: Pulse, live: Life, ours: Channel) -> None:
        self._pulse = pulse
        self.closing = False
        self._meeting = make_endpoint(launch.run.config.transport)
        self._share_fd = os.memfd_create("anabranch-weights", 0)
        self.endpoint = Endpoint((0,), self._meeting.text, self._share_fd)
        self._ring = Ring.create(launch.run.layout.mesh.world - 1)
        self._writer = RingWriter(self._ring)
        self.members: list[_Child] = []
        for rank in range(1, launch.run.layout.mesh.world):
            mine = replace(
                launch,
                slot=rank,
                endpoint=replace(self.endpoint, ranks=(rank,)),
                mask=launch.masks[rank] if launch.masks else (),
                plans=self._ring.fd,
            )
            held = [ours, *(member.channel for member in self.members)]
            self.members.append(_Child(mine, live, held))

    def order(self, message: StepPlan | Control) -> None:
        """Through the ring, or through each channel if the order is long."""
        frame = TO_RANK.encode(message)
        if len(frame) <= self._ring.longest:
            self._writer.publish(frame, STEP_SECONDS)
            return
        self._writer.publish(LOOK_ELSEWHERE, STEP_SECONDS)
        for member in self.members:
            member.channel.send(frame)
        for member in self.members:
            member.channel.flush(STEP_SECONDS)

    def watch(self) -> None:
        """Report a rank that ended by itself. Called from the pulse thread."""
        for member in self.members:
            if self.closing:
                return
            code = member.process.exitcode
            if code is not None and not self.closing:
                pid = member.process.pid
                self._pulse.fail(f"rank {member.rank} (pid {pid}) {how_it_ended(code)}")

    def close(self) -> None:
        self.closing = True
        with suppress(TimeoutError):  # a rank that reads nothing is killed below
            self._writer.publish(FAREWELL, END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        for member in self.members:
            member.channel.close()
        for member in self.members:
            member.end(deadline)
        self._meeting.close()
        os.close(self._share_fd)
        self._ring.close()


class TreeCrew:
    """Rank 0 in the caller's thread, all others behind channels."""

    def __init__(self, launch: Launch, ranks: Others) -> None:
        self._ranks = ranks
        size = launch.run.layout.mesh.replica_size
        self._leaders = [m for m in ranks.members if m.rank % size == 0]
        self._local = LocalCrew(launch.run, launch.path, launch.maker, ranks.endpoint)
        for member in ranks.members:
            member.expect(Loaded, LOAD_SECONDS)

    def start(self, plan: StepPlan) -> None:
        self._ranks.order(plan)
        self._local.start(plan)

    def result(self) -> StepResult:
        number, parts = self._local.parts()
        found = [part for part in parts if part is not None]
        found += [member.expect(ReplicaResult, STEP_SECONDS) for member in self._leaders]
        return StepResult(number, tuple(found))

    def call(self, name: str, payload: bytes) -> list[bytes]:
        self._ranks.order(Control(name, payload))
        errors: list[str] = []
        replies: list[bytes] = []
        try:
            replies += self._local.call(name, payload)
        except ValueError as error:
            errors.append(str(error))
        for member in self._ranks.members:
            reply = member.expect(ControlReply, STEP_SECONDS)
            replies += reply.replies
            errors += [reply.error] if reply.error is not None else []
        if errors:
            raise ValueError(errors[0])
        return replies

    def close(self) -> None:
        self._ranks.close()
        self._local.close()
