"""Ranks that somebody else started, on any hosts: torchrun and its environment variables.

Rank 0 is the brain's. It publishes an address and a secret in the launcher's store; the other ranks
connect to it for their orders. Rows travel over gloo. Whoever can reach the store is trusted, as in
every use of torch.distributed.
"""

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anabranch.core.config import EngineConfig
from anabranch.core.messages import Fatal
from anabranch.core.plan import StepPlan
from anabranch.engine.crew import RANK_MAKER, describe, load_maker
from anabranch.engine.masks import choose_masks, read_topology
from anabranch.engine.protocol import (
    FROM_RANK,
    TO_RANK,
    Control,
    Endpoint,
    Hello,
    Launch,
    Loaded,
)
from anabranch.engine.pulse import STEP_SECONDS, Pulse
from anabranch.engine.rank import FAREWELL, IDLE_SECONDS, follow
from anabranch.engine.tree import Member
from anabranch.weights.locate import locate
from anabranch.wire import Channel, WireError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEETING = "gloo:env://"
JOIN_SECONDS = 600.0


@dataclass(frozen=True)
class Place:
    """Where torchrun put this process: its rank of `world`, and among the host's ranks."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def place_of_process(config: EngineConfig) -> Place | None:
    """The place, if this process was started by torchrun as one of several ranks.

    ValueError if their number is not --tp.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in names):
        return None
    place = Place(*(int(os.environ[name]) for name in names))
    if place.world == 1:
        return None
    if place.world != config.tp:
        raise ValueError(f"torchrun started {place.world} ranks, but --tp is {config.tp}")
    return place


class RemoteRanks:
    """The other ranks, seen from rank 0. Waits until all have connected."""

    def __init__(self, launch: Launch) -> None:
        self.endpoint = Endpoint((0,), MEETING)
        self.members: list[Member] = []
        world = launch.run.layout.mesh.world
        secret = secrets.token_hex(16)
        host = os.environ["MASTER_ADDR"]
        with socket.create_server((host, 0)) as listener:
            address = f"{host} {listener.getsockname()[1]} {secret}"
            self._store = _store(0, world)  # kept: it may be this process that runs it
            self._store.set(_key(), address)
            joined = _accept(listener, secret, world - 1)
        for rank, channel in sorted(joined.items()):
            mine = replace(launch, slot=rank, endpoint=Endpoint((rank,), MEETING), masks=())
            channel.send(TO_RANK.encode(mine))
            self.members.append(Member(rank, channel))

    def order(self, message: StepPlan | Control) -> None:
        frame = TO_RANK.encode(message)
        for member in self.members:
            member.channel.send(frame)
        for member in self.members:
            member.channel.flush(STEP_SECONDS)

    def close(self) -> None:
        for member in self.members:
            member.channel.close()


def _accept(listener: socket.socket, secret: str, count: int) -> dict[int, Channel]:
    """Channels of `count` ranks that know the secret; others are turned away."""
    deadline = time.monotonic() + JOIN_SECONDS
    joined: dict[int, Channel] = {}
    while len(joined) < count:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(sock)
        with suppress(TimeoutError, ConnectionError, WireError):
            hello = FROM_RANK.decode(channel.recv(10.0))
            if isinstance(hello, Hello) and secrets.compare_digest(hello.secret, secret):
                joined[hello.rank] = channel
                continue
        channel.close()
    return joined


def serve_if_rank(config: EngineConfig, maker: str = RANK_MAKER) -> bool:
    """In a process that torchrun started as rank 1 or above: serve until rank 0 is done, and True.

    In every other process False, at once. Call it before anything that only rank 0 should do.
    """
    place = place_of_process(config)
    if place is None or place.rank == 0:
        return False
    path = locate(config.model)
    masks = choose_masks(read_topology(config.cores), place.local_world)
    os.sched_setaffinity(0, masks.ranks[place.local_rank])
    host, port, secret = _store(place.rank, place.world).get(_key()).decode().split()
    channel = Channel(socket.create_connection((host, int(port)), JOIN_SECONDS))
    channel.send(FROM_RANK.encode(Hello(place.rank, secret)))
    launch = TO_RANK.decode(channel.recv(JOIN_SECONDS))
    assert isinstance(launch, Launch), f"{type(launch).__name__} before the launch"
    run = launch.run if config.threads else replace(launch.run, threads=masks.threads)
    try:
        worker = load_maker(maker, run, str(path), launch.endpoint).make(place.rank)
        channel.send(FROM_RANK.encode(Loaded(place.rank)))
        follow(worker, lambda: _next_order(channel), channel, Pulse.create(1), 0)
    except BaseException as error:
        channel.send(FROM_RANK.encode(Fatal(f"rank {place.rank}: {describe(error)}")))
        raise
    return True


def _next_order(channel: Channel) -> bytes | None:
    try:
        return channel.recv(IDLE_SECONDS)
    except TimeoutError:
        return None
    except ConnectionError:
        return FAREWELL


def _key() -> str:
    """Restarted ranks meet under a new key."""
    return f"anabranch/orders/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(rank: int, world: int) -> "Store":
    from anabranch.comm.transports.gloo import url_store

    return url_store("env://", rank, world, JOIN_SECONDS)
