"""Every command of the cookbook runs; generated pages are what their generators make."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = re.findall(
    r"^```bash\n(.*?)^```", (ROOT / "docs" / "cookbook.md").read_text(), re.M | re.S
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_cookbook(number: int, tmp_path: Path) -> None:
    ids, out = tmp_path / "ids.json", tmp_path / "out.npy"
    ids.write_text(json.dumps([0, 3, 40, 41, 42, 43, 44, 45]))
    command = COMMANDS[number].replace("IDS", str(ids)).replace("OUT", str(out))
    command = command.replace("anabranch ", f"{sys.executable} -m anabranch.cli.main ", 1)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-euc", command],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "generate" in command:
        assert "42" in done.stdout, done.stdout
    if "score" in command:
        assert out.exists()


def test_cookbook_has_recipes() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("tool", ["docs", "structure", "performance"])
def test_generated_pages_are_up_to_date(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, f"tools/{tool}.py", "--check"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
