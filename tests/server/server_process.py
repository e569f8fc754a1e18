"""A server over the made-up engine, as a process of its own: real sockets, real signals."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


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
