"""What the engine must show: one process that serves real models, from a clone to a hang-up.

Tests carry the statements; here they are run and counted. Nothing is measured while something else
is: lines run one after the other.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.showing.line import ROOT, Line, Measured, json_of, python, tests

MODEL = "smollm2-135m-instruct"
SUBSET = "tests/test_seeds.py tests/ops tests/engine tests/demo"
"""Tests of the clone without a compiler: where compiled ops could have been."""


def readme_command(name: str) -> str:
    """The one-line command that README.md shows between its markers."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"<!-- {name} command -->\s*```bash\n(.+?)\n```", text, re.S)
    if found is None:
        raise RuntimeError(f"README.md has no {name} command")
    return found[1]


@contextmanager
def fresh_clone() -> Iterator[Path]:
    """A clone of the checkout's last commit, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="anabranch-clone-") as folder:
        clone = Path(folder) / "anabranch"
        subprocess.run(
            ["git", "clone", "-q", "--no-local", str(ROOT), str(clone)], check=True, timeout=300
        )
        yield clone


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what would let the clone find anything but itself."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def shell(words: str, folder: Path, environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """(exit status, last lines) of a command line."""
    done = subprocess.run(
        ["bash", "-euc", words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).strip()[-400:]


def asked_by_curl(clone: Path, environment: dict[str, str]) -> tuple[Measured, bool]:
    """Serve a real model from the clone's environment and ask it as the README does."""
    port = "8123"
    words = [".venv/bin/anabranch", "serve", MODEL, "--port", port]
    server = subprocess.Popen(words, cwd=clone, env=environment, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)  # fmt: skip
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 16, "temperature": 0}  # fmt: skip
    curl = ["curl", "-sS", "--retry", "120", "--retry-connrefused", "--retry-all-errors",
            "--retry-delay", "1", "--fail", f"http://127.0.0.1:{port}/v1/chat/completions",
            "-H", "content-type: application/json", "-d", json.dumps(body)]  # fmt: skip
    try:
        done = subprocess.run(curl, capture_output=True, text=True, timeout=600, check=False)
        answer = done.stdout if done.returncode == 0 else done.stderr[-300:]
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(30)
    if done.returncode != 0:
        return {"curl": answer}, False
    text = json.loads(answer)["choices"][0]["message"]["content"]
    return {"answer": text, "server_exit": code}, "Paris" in text and code == 0


def from_a_fresh_clone(compiler: bool) -> tuple[Measured, bool]:
    more = {} if compiler else {"CXX": "/bin/false"}
    environment = clean_environment(**more)
    measured: Measured = {"commit": _head(), "CXX": more.get("CXX", "the system's")}
    with fresh_clone() as clone:
        begin = time.monotonic()
        code, said = shell(readme_command("run"), clone, environment, 3600)
        measured |= {"run_command_exit": code, "run_command_s": round(time.monotonic() - begin)}
        if code:
            return {**measured, "said": said}, False
        built = list(clone.glob(".venv/lib/python*/site-packages/anabranch/ops/cpu/_cpu*.so"))
        answer, answered = asked_by_curl(clone, environment)
        measured |= {"compiled_ops": bool(built), **answer}
        shutil.rmtree(clone / ".venv")  # the second command makes its own
        if not compiler:
            environment["PYTEST_ADDOPTS"] = SUBSET
            measured["tests"] = SUBSET
        begin = time.monotonic()
        code, said = shell(readme_command("test"), clone, environment, 7200)
        seconds = round(time.monotonic() - begin)
        counts = counted(clone / ".pytest-report.xml")
        measured |= {"test_command_exit": code, "test_command_s": seconds, **counts}
        if code:
            measured["said"] = said
    good = answered and code == 0 and bool(built) == compiler
    return measured, good


def _head() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                          text=True, check=True)  # fmt: skip
    return done.stdout.strip()


def counted(report: Path) -> Measured:
    """Tests, failures and skips of a junit report, and the properties that tests recorded."""
    if not report.is_file():
        return {"report": "none"}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    return {"passed": passed, "failed": bad, "skipped": counts["skipped"]}


def recorded(*ids: str, floor: int = 1) -> tuple[Measured, bool]:
    """Tests as `tests` runs them, with what they recorded (counts, largest differences)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o",
                      "addopts=--strict-markers", f"--junitxml={report}", *ids,
                      timeout=7200)  # fmt: skip
        counts = counted(report)
        if not report.is_file():
            return {"said": (done.stdout + done.stderr)[-300:]}, False
        values: dict[str, object] = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            found = {str(p.get("name")): p.get("value") for p in case.iter("property")}
            for fault in (*case.iter("failure"), *case.iter("error")):
                found["failure"] = str(fault.get("message"))[:300]
            if found:
                values[str(case.get("name"))] = found
    passed = counts["passed"]
    good = counts["failed"] == 0 and counts["skipped"] == 0
    measured = {**counts, **({"recorded": values} if values else {})}
    return measured, good and isinstance(passed, int) and passed >= floor


def with_the_model(*ids: str, floor: int = 1) -> tuple[Measured, bool]:
    """`recorded`, with the real model in the cache first."""
    pulled = python("-m", "anabranch.cli.main", "pull", MODEL, timeout=1800)
    if pulled.returncode:
        return {"pull": pulled.stderr[-300:]}, False
    return recorded(*ids, floor=floor)


def startup() -> tuple[Measured, bool]:
    pulled = python("-m", "anabranch.cli.main", "pull", MODEL, timeout=1800)
    if pulled.returncode:
        return {"pull": pulled.stderr[-300:]}, False
    measured = json_of(["bench/startup.py"])
    result = measured.pop("result")
    assert isinstance(result, dict)
    rows = measured["rows"] = result["rows"]
    return measured, all(r["wanted"] is None or r["seconds"] <= r["wanted"] for r in rows)


def ledger_points_at_the_seeds() -> tuple[Measured, bool]:
    import tomllib

    entry = tomllib.loads((ROOT / "tests/ledger.toml").read_text()).get("C1", {})
    named: Sequence[str] = entry.get("tests", [])
    counts, good = recorded("tests/test_seeds.py")
    points = any(name.startswith("tests/test_seeds.py") for name in named)
    return {**counts, "C1": list(named)}, good and points


SERVER = "tests/e2e/test_server.py"

LINES = [
    Line("seeds: every kind of split is one process", "green, ledger C1 points at it",
         ledger_points_at_the_seeds),
    Line("fresh clone: README's commands", "server answers curl with a real model; tests pass",
         lambda: from_a_fresh_clone(compiler=True)),
    Line("fresh clone without a compiler: README's commands",
         "the same with CXX=/bin/false (tests: the subset named)",
         lambda: from_a_fresh_clone(compiler=False)),
    Line("families equal transformers", "logits to 1e-4, 24 greedy tokens, every cell",
         tests("tests/models/test_families.py", floor=100)),
    Line("SmolLM2 fp32 and bf16 against transformers",
         "8 prompts x 64 tokens equal in fp32; in bf16 every first difference a tie within a step",
         lambda: with_the_model("tests/models/test_smollm2.py", floor=2)),
    Line("GGUF types bit-equal to the gguf package", "all",
         tests("tests/weights/test_gguf.py", floor=6)),
    Line("sampler", "20,000 draws per setting, chi-square p > 1e-3",
         lambda: recorded("tests/worker/test_sampler.py", floor=10)),
    Line("40 pages, 64 requests, aborts",
         "tokens equal alone, pages as before, hits and preemptions > 0",
         lambda: recorded("tests/worker/test_pressure.py", floor=4)),
    Line("openai client: rules of the API", "all",
         tests("tests/server/test_openai.py", "tests/server/test_fields.py", floor=40)),
    Line("openai client: the real engine", "all", tests(f"{SERVER}::TestOpenAIClient", floor=5)),
    Line("200 concurrent streams", "exactly 32 ids each, equal to the request alone",
         tests(f"{SERVER}::test_200_streams_are_each_alone")),
    Line("100 hang-ups", "running 0 and free pages as before within 5 s",
         tests(f"{SERVER}::test_100_hang_ups_leave_nothing")),
    Line("SIGTERM with 20 streams", "each ends with a reason or an error, exit 0 within 10 s",
         tests(f"{SERVER}::test_sigterm_ends_20_streams_in_order")),
    Line("an idle server", "< 2% of a core for every process",
         tests(f"{SERVER}::test_an_idle_server_rests")),
    Line("a process is killed or stopped, two ranks",
         "error events and /health 503 within 5 s, tree gone within 10 s, port free",
         tests("tests/e2e/test_serving_faults.py", floor=4)),
    Line("bad input", "clear errors, server alive",
         tests("tests/server", "tests/weights", "tests/core", "tests/text", floor=200)),
    Line("start-up", "first streamed token <= 4 s (median of 5), --help <= 0.3 s", startup),
]  # fmt: skip

if __name__ == "__main__":
    sys.exit("run it through tools/shows.py engine")
