"""Codecs keep every message equal and refuse everything else; channels keep frames whole."""

import asyncio
import dataclasses
import socket
import threading
from dataclasses import dataclass

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.config import EngineConfig
from anabranch.core.messages import Abort, Fatal, Output, Ready, Stats, Submit
from anabranch.core.plan import (
    Chunks,
    Join,
    Phase,
    ReplicaPlan,
    ReplicaResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from anabranch.core.request import Request, SamplingParams
from anabranch.core.resolve import RunConfig
from anabranch.wire import Channel, Schema, WireError
from anabranch.wire.codec import form_of
from anabranch.wire.stream import AsyncChannel

MESSAGES = (Submit, Abort, Output, Stats, Ready, Fatal, StepPlan, StepResult, EngineConfig)
SCHEMA = Schema(*MESSAGES)


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        names = [f.name for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def plan() -> StepPlan:
    ints = np.arange(3, dtype=np.int32)
    flags = np.ones(3, np.uint8)
    chunks = Chunks(ints, ints, ints, -ints, flags, flags, ints)
    join = Join(3, SamplingParams(seed=-(2**63), stop=("a", "é")), 7, 2, 2**63 - 1, (1, 2))
    part = ReplicaPlan((1,), (join,), ((3, (4, 5)), (1, ())), ((1, 2),), chunks, Chunks())
    return StepPlan(9, (part, ReplicaPlan()))


def result() -> StepResult:
    entry = TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, -float("inf"))))
    seats = np.array([1], np.int32)
    part = ReplicaResult(seats, seats, {1: entry}, {2: (entry, entry)}, {0: (5, b"\0\1")})
    return StepResult(9, (part,))


@pytest.mark.parametrize(
    "message",
    [
        Submit(Request("x", (1, 2), SamplingParams(temperature=0, stop_ids=(3,)), 2.5, 1)),
        Abort("ü"),
        Output("x", (1,), (TokenLogprobs(1, -1.0, 2, ()),), (), "stop", 1, 5, "why", ((0, b"a"),)),
        Output("x"),
        Stats(1, 2, (3, 4), 5, 6, 7, 8, 9, 10, 11, (1,), (2,)),
        Ready(10, 20, (1,), "{}"),
        Fatal("no", {"a": "b"}),
        plan(),
        result(),
        EngineConfig(model="m", tp=4),
    ],
    ids=lambda m: type(m).__name__,
)
def test_round_trip(message: object) -> None:
    found = SCHEMA.decode(SCHEMA.encode(message))
    if isinstance(message, Submit):  # an int where a float is wanted arrives as a float
        sampling = dataclasses.replace(message.request.sampling, temperature=0.0)
        message = Submit(dataclasses.replace(message.request, sampling=sampling))
    assert same(message, found)


def test_run_config_can_travel() -> None:
    assert form_of(RunConfig).pack is not None


def test_arrays_arrive_writable() -> None:
    found = SCHEMA.decode(SCHEMA.encode(plan()))
    assert isinstance(found, StepPlan)
    found.replicas[0].prefill.seat[0] = 5


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (b"\x01\x02", "no msgpack"),
        (1, "wanted [name, fields]"),
        (["Abort"], "wanted [name, fields]"),
        (["Exec", ["x"]], "no message"),
        (["Abort", ["x", 1]], "has 1 fields, found 2"),
        (["Abort", []], "has 1 fields, found 0"),
        (["Abort", [1]], "Abort.id: wanted str, found 1"),
        (["Abort", {"id": "x"}], "wanted a tuple"),
        (["Ready", [True, 1, [], ""]], "Ready.vocab_size: wanted int, found True"),
        (["Ready", [1, 1, [1.0], ""]], "Ready.eos_ids: wanted int, found 1.0"),
        (["Fatal", ["x", {"a": 1}]], "Fatal.detail: wanted str"),
        (["StepResult", [0, [[b"123", b"", {}, {}, {}]]]], "bytes of int32"),
    ],
)
def test_strict(value: object, error: str) -> None:
    data = value if isinstance(value, bytes) else msgpack.packb(value)
    with pytest.raises(WireError) as found:
        SCHEMA.decode(data)
    assert error in str(found.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_bytes_never_do_more_than_fail(data: st.DataObject) -> None:
    good = bytearray(SCHEMA.encode(plan()))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = SCHEMA.decode(bytes(good))
    except WireError:
        return
    assert isinstance(found, MESSAGES)


def test_refuses_to_send_what_it_could_not_read() -> None:
    with pytest.raises(WireError, match="no message"):
        SCHEMA.encode(Phase.DECODE)
    wrong = dataclasses.replace(plan().replicas[0].prefill, seat=np.zeros(2, np.int64))
    with pytest.raises(WireError, match="int32"):
        SCHEMA.encode(StepPlan(0, (ReplicaPlan(prefill=wrong),)))

    @dataclass(frozen=True)
    class Odd:
        x: object

    with pytest.raises(TypeError, match="cannot travel"):
        Schema(Odd)


def test_channel_keeps_frames_whole() -> None:
    """Big and small frames, both ways, with a reader slower than the writer."""
    left, right = Channel.pair()
    frames = [b"", b"a", bytes(3_000_000), b"end"]

    def peer() -> None:
        for frame in frames:
            assert right.recv(10) == frame
            right.send(frame[:5])
        right.flush(10)

    thread = threading.Thread(target=peer)
    thread.start()
    left.send(*frames)
    left.flush(10)
    assert [left.recv(10) for _ in frames] == [f[:5] for f in frames]
    thread.join(10)
    right.close()
    left.wait(5)
    assert left.receive() == [] and left.closed
    with pytest.raises(ConnectionError):
        left.recv(1)


def test_channel_deadlines() -> None:
    left, right = Channel.pair()
    with pytest.raises(TimeoutError, match="no message"):
        left.recv(0.05)
    left.send(bytes(10_000_000))
    assert left.unsent > 0
    with pytest.raises(TimeoutError, match="took nothing"):
        left.flush(0.05)
    right.close()


def test_channel_refuses_absurd_lengths() -> None:
    a, b = socket.socketpair()
    channel = Channel(a)
    b.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="announced"):
        channel.recv(1)
    b.close()


def test_async_end() -> None:
    async def run() -> None:
        a, b = socket.socketpair()
        front, brain = await AsyncChannel.open(a), Channel(b)
        front.send(b"hello")
        assert brain.recv(5) == b"hello"
        brain.send(b"x" * 100, b"y")
        assert [await front.recv(), await front.recv()] == [b"x" * 100, b"y"]
        brain.close()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(front.recv(), 5)
        front.close()

    asyncio.run(run())
