"""Every command of README and docs runs and prints what the page says; generated pages are fresh.

A block of commands is a ```bash fence; a ```text fence after it holds lines of which each word
must appear, in order, in one line of the output. Blocks between `<!-- ... command -->` markers make
their own environment and are run by .ci/run.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
OWN_ENVIRONMENT = re.compile(r"<!-- \w+ command -->.*?<!-- end -->", re.S)


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    body: str
    prints: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {self.body.splitlines()[0][:60]}"


def blocks() -> list[Block]:
    found: list[Block] = []
    for page in PAGES:
        for language, body in FENCE.findall(OWN_ENVIRONMENT.sub("", page.read_text())):
            if language == "text" and found and found[-1].page == page.name:
                found[-1] = Block(page.name, found[-1].language, found[-1].body, body)
            elif language in ("bash", "python"):
                found.append(Block(page.name, language, body))
    return found


BLOCKS = blocks()
SERVERS = [b for b in BLOCKS if "anabranch serve" in b.body]
FINITE = [b for b in BLOCKS if b not in SERVERS]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def here(body: str) -> str:
    """The commands with this interpreter in the place of an installed script."""
    script = f"{sys.executable} -m anabranch.cli.main "
    body = re.sub(r"(?<![\w/.-])(?:\.venv/bin/)?anabranch (?=\w)", script, body)
    return re.sub(r"(?<![\w/])\.venv/bin/python\b", sys.executable, body)


def printed(wanted: str, output: str) -> list[str]:
    """Lines of a text block that no line of the output holds, word by word and in order."""
    flat = " ".join(output.split())
    lines = [" ".join(line.split()) for line in output.splitlines()]

    def holds(text: str) -> bool:
        words = ".*".join(re.escape(w) for w in text.split())
        return text in flat or any(re.search(words, line) for line in lines)

    return [line for line in wanted.splitlines() if line.strip() and not holds(line.strip())]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", FINITE, ids=str)
def test_block(block: Block, tmp_path: Path) -> None:
    command = [sys.executable, "-c", block.body]
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", here(block.body)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert printed(block.prints, done.stdout + done.stderr) == [], done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", SERVERS, ids=str)
def test_server_block(block: Block, tmp_path: Path) -> None:
    """The first line serves, on a free port; the rest, if any, talks to it."""
    first, _, rest = block.body.partition("\n")
    port = free_port()
    command = [*here(first).split(), "--port", str(port)]
    server = subprocess.Popen(command, cwd=tmp_path, env=environment(), start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, f"the server ended with {server.returncode}"
            assert time.monotonic() < deadline, "the server does not get ready"
            time.sleep(0.3)
        if rest.strip():
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", here(rest).replace(":8000", f":{port}")],
                cwd=tmp_path, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert '"content"' in done.stdout or '"text"' in done.stdout, done.stdout
    finally:
        server.terminate()
        server.wait(30)


def test_pages_hold_commands() -> None:
    pages = {b.page for b in BLOCKS}
    assert {"README.md", "cookbook.md"} <= pages and len(FINITE) >= 10 and SERVERS
    assert all(b.prints for b in BLOCKS if b.page == "cookbook.md"), (
        "each recipe says what it prints"
    )


def test_the_page_of_layouts_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"], cwd=ROOT, env=environment(), timeout=100,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
