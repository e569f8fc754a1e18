"""The plan ring: every reader gets every frame, in order, however slow it is; nobody spins."""

import multiprocessing
import random
import threading
import time

import pytest

from anabranch.wire.ring import Ring, RingReader, RingWriter

FRAMES = 3000


def frame_of(i: int) -> bytes:
    rng = random.Random(i)
    return rng.randbytes(rng.choice([0, 1, 100, 3000, 20000]))


def read_all(fd: int, index: int, slow: bool) -> None:
    """In a child: exits with an error if any frame is missing, late or wrong."""
    reader = RingReader(Ring(fd), index)
    rng = random.Random(index)
    for i in range(FRAMES):
        frame = reader.take(20)
        assert frame == frame_of(i), f"reader {index}, frame {i}"
        if slow and rng.random() < 0.02:
            time.sleep(0.005)
    assert reader.take(0.01) is None


def test_processes_read_every_frame() -> None:
    """A ring far smaller than what passes through it, readers of different speed."""
    ring = Ring.create(3, capacity=50_000)
    fork = multiprocessing.get_context("fork")  # the memory file is inherited by its number
    children = [fork.Process(target=read_all, args=(ring.fd, i, i == 1)) for i in range(3)]
    for child in children:
        child.start()
    writer = RingWriter(ring)
    for i in range(FRAMES):
        writer.publish(frame_of(i), 20)
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    ring.close()


def test_writer_waits_for_the_slowest_and_names_it() -> None:
    ring = Ring.create(2, capacity=1000)
    readers = [RingReader(ring, i) for i in range(2)]
    writer = RingWriter(ring)
    writer.publish(b"a" * 400, 1)
    writer.publish(b"b" * 400, 1)
    assert readers[0].take(1) == b"a" * 400 and readers[0].take(1) == b"b" * 400
    with pytest.raises(TimeoutError, match="reader 1"):
        writer.publish(b"c" * 400, 0.05)
    assert readers[1].take(1) == b"a" * 400
    writer.publish(b"c" * 400, 1)
    assert [readers[1].take(1), readers[1].take(1)] == [b"b" * 400, b"c" * 400]
    assert readers[0].take(1) == b"c" * 400
    for i in range(200):  # more frames than the index has slots
        writer.publish(bytes([i]), 1)
        assert [reader.take(1) for reader in readers] == [bytes([i])] * 2
    ring.close()


def test_index_is_a_limit_too() -> None:
    ring = Ring.create(1)
    writer, reader = RingWriter(ring), RingReader(ring, 0)
    for i in range(64):
        writer.publish(bytes([i]), 1)
    with pytest.raises(TimeoutError):
        writer.publish(b"x", 0.05)
    assert [reader.take(1) for _ in range(64)] == [bytes([i]) for i in range(64)]
    writer.publish(b"x", 1)
    assert reader.take(1) == b"x"
    ring.close()


def test_reader_sleeps_and_wakes_at_once() -> None:
    ring = Ring.create(1)
    writer, reader = RingWriter(ring), RingReader(ring, 0)
    begin = time.thread_time()
    assert reader.take(0.5) is None
    assert time.thread_time() - begin < 0.05
    late = threading.Timer(0.2, writer.publish, (b"now", 1))
    late.start()
    begin = time.monotonic()
    assert reader.take(10) == b"now"
    assert time.monotonic() - begin < 5
    late.join()  # it may still be in the call that woke this one
    ring.close()


def test_bytes_that_are_not_all_there_are_not_taken() -> None:
    """What a weakly ordered processor may show: the count first, the bytes later."""
    ring = Ring.create(1)
    ring.write(0, 0, b"hello")
    ring._map[ring._data + 2] = 0
    ring.announce(1)
    reader = RingReader(ring, 0)
    assert reader.take(0.02) is None
    ring._map[ring._data + 2] = ord("l")
    assert reader.take(1) == b"hello"
    ring.close()
