"""Servers over a made-up engine, as processes, so that sockets and signals are the real ones."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "text"))

from server_process import ServerProcess  # noqa: E402
from tiny_text import save_tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


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
