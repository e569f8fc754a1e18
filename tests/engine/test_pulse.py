"""Signs of life: who is judged, and by what."""

import os
import threading

from anabranch.engine.pulse import Pulse


def test_a_process_is_judged_from_its_first_stamp_on() -> None:
    pulse = Pulse.create(2)
    assert pulse.problem() is None and pulse.pids() == []
    pulse._words[pulse._line(1)] = os.getpid()  # the line before its stamp is seen
    assert pulse.problem() is None
    pulse._words[pulse._line(1) + 1] = 1  # at boot: long ago
    assert "rank 1" in str(pulse.problem())
    pulse.stamp(1)
    assert pulse.problem() is None
    pulse.close()


def test_a_starting_process_is_never_seen_half() -> None:
    for _ in range(200):
        pulse = Pulse.create(1)
        stamps = threading.Thread(target=pulse.stamp, args=(0,))
        stamps.start()
        while not pulse.pids():
            assert pulse.problem() is None
        assert pulse.problem() is None
        stamps.join()
        pulse.close()


def test_the_first_failure_stands() -> None:
    pulse = Pulse.create(1)
    pulse.fail("disk full")
    pulse.fail("later")
    assert pulse.problem() == "disk full"
    pulse.close()
