"""Servers over a made-up engine, as processes, so that sockets and signals are the real ones."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "text"))

from tiny_text import save_tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


class ServerProcess:
    """A running server; `url` ends without a slash."""

    def __init__(self, folder: Path, *flags: str) -> None:
        source = HERE.parent.parent / "src"
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(source), str(HERE)]))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_fake.py"), str(folder), *flags],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line[:1] == ["listening"], f"the server did not start: {line}"
        self.url = line[1]
        self.pid = self.process.pid

    def wait_ready(self) -> "ServerProcess":
        assert self.process.stdout is not None
        assert self.process.stdout.readline().split()[:1] == ["ready"]
        return self

    def end(self, timeout: float = 12.0) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def start(tiny_folder: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers with flags of serve_fake; all are ended after the test."""
    begun: list[ServerProcess] = []

    def begin(*flags: str, ready: bool = True) -> ServerProcess:
        server = ServerProcess(tiny_folder, *flags)
        begun.append(server)
        return server.wait_ready() if ready else server

    yield begin
    for server in begun:
        server.end()


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    """One server for tests that leave it as it was."""
    found = ServerProcess(tiny_folder).wait_ready()
    yield found
    assert found.end() == 0
