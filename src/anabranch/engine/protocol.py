"""What travels between the engine's processes beside `core.messages`, and the channels' schemas."""

from dataclasses import dataclass

from anabranch.core.messages import Abort, Fatal, Output, Ready, Shutdown, Stats, StatsQuery, Submit
from anabranch.core.plan import ReplicaResult, StepPlan
from anabranch.core.resolve import RunConfig
from anabranch.wire import Schema


@dataclass(frozen=True)
class Endpoint:
    """How the ranks of one process reach the others of the model copy.

    ranks: those that live in this process (all of them, or one). meeting: the text of
    `comm.endpoint`, when ranks are processes. share_fd: memory file for weights held once, or -1.
    """

    ranks: tuple[int, ...]
    meeting: str = ""
    share_fd: int = -1


@dataclass(frozen=True)
class Launch:
    """What a process of the tree is to be: the first message to it, or what it was forked with.

    path: of the checkpoint. maker: "module:class" of the worker maker. slot: this process's line in
    the pulse page.
    mask: cores it may run on; empty leaves them as they are. masks: for the brain, those of every
    rank in rank order, or empty. plans: for a rank, the ring that its orders come through.
    """

    run: RunConfig
    path: str
    maker: str
    slot: int
    endpoint: Endpoint
    mask: tuple[int, ...] = ()
    masks: tuple[tuple[int, ...], ...] = ()
    plans: int = -1


@dataclass(frozen=True)
class Hello:
    """A rank that somebody else started says who it is; see remote.py."""

    rank: int
    secret: str


@dataclass(frozen=True)
class Loaded:
    """A rank process has built its worker."""

    rank: int


@dataclass(frozen=True)
class Outputs:
    """Everything one step produced."""

    items: tuple[Output, ...]


@dataclass(frozen=True)
class Control:
    """Run a worker's control verb (such as update_weights) on every rank, between steps."""

    name: str
    payload: bytes = b""


@dataclass(frozen=True)
class ControlReply:
    """One reply per rank, in rank order; error is set if any rank refused."""

    replies: tuple[bytes, ...] = ()
    error: str | None = None


TO_BRAIN = Schema(Launch, Submit, Abort, StatsQuery, Control, Shutdown)
FROM_BRAIN = Schema(Outputs, Stats, Ready, ControlReply, Fatal)
TO_RANK = Schema(Launch, StepPlan, Control)
FROM_RANK = Schema(Hello, Loaded, ReplicaResult, ControlReply, Fatal)
