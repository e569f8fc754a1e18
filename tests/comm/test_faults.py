"""A rank that ends, stops, aborts or disagrees ends the others' waits: the error names it."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from tests.comm import faults
from tests.comm.ranks import Processes, run_processes, run_threads

from anabranch.comm.endpoint import choose_transport, make_endpoint
from anabranch.comm.transports.shm import ShmWorld
from anabranch.comm.worlds import open_world

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("kind", ("shm", "gloo"))
def test_dead_peer_is_named(kind: str) -> None:
    with Processes(kind, 3, faults.gather_until, 1, "kill", timeout=20.0) as ranks:
        for message, delay in ranks.results((0, 2)):
            assert "rank 1" in message and "all_gather among ranks (0, 1, 2)" in message
            assert delay < 10, "found by its end, not by the deadline"
        if kind == "shm":
            assert "has ended" in message or "failed" in message


@pytest.mark.parametrize("kind", ("shm", "gloo"))
def test_stuck_peer_is_named(kind: str) -> None:
    with Processes(kind, 3, faults.gather_until, 2, "stop", timeout=2.0) as ranks:
        for message, delay in ranks.results((0, 1)):
            assert "rank 2" in message and "all_gather among ranks (0, 1, 2)" in message
            assert 1.5 < delay < 15
        if kind == "shm":
            states = [m for m, _ in ranks.results(())] + [message]
            assert any("state T" in m or "failed" in m for m in states)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share a core never spin")
def test_a_spin_grows_with_short_sleeps_and_shrinks_with_a_long_one() -> None:
    """Else ranks whose wakes take longer than the spin would sleep at every wait once they had."""
    spins = run_processes("shm", 2, faults.late_peer)[0]
    least = spins["little"][0]
    assert least > 0 and max(spins["little"]) > 2 * least
    assert min(spins["much"][1:]) == least


def test_other_verb_is_named() -> None:
    messages = run_processes("shm", 2, faults.disagree)
    assert any("is in" in m and "all_gather" in m and "reduce_scatter" in m for m in messages)
    assert "no error" not in messages


def test_other_counts_are_named() -> None:
    messages = run_processes("shm", 3, faults.disagree_on_counts)
    assert "rank 0" in messages[1] and "32 bytes for rank 1" in messages[1], messages


@pytest.mark.parametrize("run", (run_processes, run_threads))
def test_abort_wakes_the_others(run) -> None:
    start = time.monotonic()
    messages = run("shm", 3, faults.give_up)
    assert messages[1] == "aborted"
    assert all("rank 1 " in m for m in (messages[0], messages[2])), messages
    assert time.monotonic() - start < 25


def test_a_long_wait_sleeps() -> None:
    """Waiting 1.5 s for a late rank costs a few milliseconds of processor."""
    used = run_processes("shm", 2, faults.late, 1.5)
    assert used[1] < 0.1


def test_ranks_that_share_cores() -> None:
    """8 ranks on the cores there are: at most 0.3 ms an exchange where they outnumber the cores."""
    cores = len(os.sched_getaffinity(0))
    if cores >= 8:
        pytest.skip("needs fewer than 8 cores")
    best = min(max(run_processes("shm", 8, faults.exchange_time, 400)) for _ in range(2))
    assert best < 0.3e-3 * max(1.0, os.getloadavg()[0] / cores), best


def test_nothing_is_left_after_kill() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with Processes("shm", 2, faults.gather_until, 0, "stop", timeout=60.0) as ranks:
        time.sleep(2.0)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert after <= before
    assert run_processes("shm", 2, faults.memory_held) == [[], []]


def test_a_rank_that_never_joins_is_named() -> None:
    endpoint = make_endpoint("shm")
    with pytest.raises(RuntimeError, match=r"joining: rank 1 did not come within 0.3 s"):
        open_world(endpoint.text, 0, 2, timeout=0.3)
    endpoint.close()


def test_a_file_of_another_run_is_refused() -> None:
    endpoint = make_endpoint("shm")
    fd, nonce = endpoint.fds[0], bytes.fromhex(endpoint.text.split(":")[2])
    ShmWorld(fd, nonce, 0, 1)
    with pytest.raises(ValueError, match="another run"):
        open_world(f"shm:{fd}:{'00' * 16}", 1, 1 + 1, 0.5)
    endpoint.close()


def test_other_files_are_refused(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"precious")
    with path.open("r+b") as file, pytest.raises(ValueError, match="not the ranks' memory file"):
        open_world(f"shm:{file.fileno()}:{'00' * 16}", 0, 1)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("scheme", ("tcp", "file"))
def test_two_worlds_in_one_process(scheme: str, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/store"
    assert run_processes("shm", 2, faults.second_world, url) == [3, 3]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, shm, gloo"):
        choose_transport("tcp")
    with pytest.raises(ValueError, match="starts with shm: or gloo:"):
        open_world("tcp://host", 0, 1)


def test_launchers_need_no_torch() -> None:
    code = (
        "import sys, anabranch.comm.endpoint as e\n"
        "e.make_endpoint('auto')\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert found.stdout.strip() == "False", found
