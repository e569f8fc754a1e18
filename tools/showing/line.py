"""A line of a show: what is run, what is wanted; and the ways lines run tests and commands."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

Measured = dict[str, object]


@dataclass(frozen=True)
class Line:
    """name says the statement; run gives (measured, ok)."""

    name: str
    wanted: str
    run: Callable[[], tuple[Measured, bool]]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", **more}


def command(
    args: Sequence[str], timeout: float = 3600, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run to its end; output is captured."""
    return subprocess.run(
        list(args), cwd=cwd, env=environment(**env), capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def python(*args: str, timeout: float = 3600, **env: str) -> subprocess.CompletedProcess[str]:
    return command([sys.executable, *args], timeout, **env)


def tests(
    *ids: str, floor: int = 1, marks: str | None = None
) -> Callable[[], tuple[Measured, bool]]:
    """pytest over `ids`; ok if at least `floor` passed and nothing failed or was skipped."""

    def run() -> tuple[Measured, bool]:
        mark = ["-m", marks] if marks is not None else ["-o", "addopts=--strict-markers"]
        found = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *mark, *ids, timeout=7200)
        last = (
            found.stdout.strip().splitlines()[-1] if found.stdout.strip() else found.stderr[-300:]
        )
        counts: Measured = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last)}
        counts = {
            k: v
            for k, v in counts.items()
            if k in ("passed", "failed", "skipped", "error", "errors")
        }
        passed = counts.get("passed", 0)
        bad = [k for k in counts if k != "passed"]
        return counts or {"said": last}, not bad and isinstance(passed, int) and passed >= floor

    return run


def json_of(args: Sequence[str], timeout: float = 3600, **env: str) -> Measured:
    """Run a command that writes JSON to a file given as its last argument, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        done = python(*args, str(out), timeout=timeout, **env)
        if not out.exists():
            raise RuntimeError((done.stderr or done.stdout)[-400:])
        value = json.loads(out.read_text())
        assert isinstance(value, dict)
        return value
