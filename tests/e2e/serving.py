"""Starting the real server as a user does, and asking it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

SRC = Path(__file__).parent.parent.parent / "src"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def running(*flags: str, timeout: float = 240.0) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Address and process of `anabranch serve FLAGS`, ready to answer; ended on the way out."""
    port = free_port()
    command = [sys.executable, "-m", "anabranch.cli.main", "serve", "--port", str(port), *flags]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    server = subprocess.Popen(command, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, server, timeout)
        yield url, server
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def served(*flags: str, timeout: float = 240.0) -> Iterator[str]:
    """The address of `anabranch serve FLAGS`, ready to answer; it is ended on the way out."""
    with running(*flags, timeout=timeout) as (url, _):
        yield url


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used (proc(5): utime and stime, in clock ticks)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alive(pid: int) -> bool:
    """Runs or is stopped; a zombie that waits for its parent is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def metric(url: str, name: str) -> float:
    """A value of /metrics; `name` without the prefix, with its labels."""
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith(f"anabranch_{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def wait_ready(url: str, server: subprocess.Popen[bytes], timeout: float) -> None:
    stop = time.monotonic() + timeout
    while time.monotonic() < stop:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {timeout:g} s")


def answers(
    url: str, questions: Sequence[str], max_tokens: int = 320
) -> list[tuple[str, list[int]]]:
    """Greedy chat answers and their token ids, all questions at once."""

    def ask(question: str) -> tuple[str, list[int]]:
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True,
        }  # fmt: skip
        got = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        got.raise_for_status()
        choice = got.json()["choices"][0]
        return choice["message"]["content"], choice["token_ids"]

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions))
