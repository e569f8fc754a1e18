"""Every ledger statement names tests, and these exist and were not skipped.

    python tools/ledger.py [JUNIT.xml]

Reads tests/ledger.toml (statement id -> test ids). With a JUnit report of the test run, a named
test that did not run or was skipped fails, unless the statement is marked gpu. Exit 1 on a miss.
"""

import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent


def collected() -> set[str]:
    """Test ids that pytest finds, slow and gpu ones included, without parameters."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ids = [line for line in found.stdout.splitlines() if "::" in line]
    return {line.split("[")[0].strip() for line in ids}


def outcomes(report: Path) -> dict[str, bool]:
    """Test id without parameters -> whether a case of it ran and none failed.

    A case that a machine cannot run (an instruction set, say) may be skipped beside others that
    ran.
    """
    ran: dict[str, bool] = {}
    failed: set[str] = set()
    for case in ET.parse(report).getroot().iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        name = (case.get("name") or "").split("[")[0]
        at = next((i for i, p in enumerate(parts) if p.startswith("test_")), len(parts) - 1)
        key = "::".join(["/".join(parts[: at + 1]) + ".py", *parts[at + 1 :], name])
        ran[key] = ran.get(key, False) or case.find("skipped") is None
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(key)
    return {key: there and key not in failed for key, there in ran.items()}


def main(argv: list[str]) -> int:
    ledger = tomllib.loads((ROOT / "tests" / "ledger.toml").read_text())
    known = collected()
    ran = outcomes(Path(argv[0])) if argv else None
    misses = []
    for statement, entry in ledger.items():
        for test in entry["tests"]:
            if test not in known:
                misses.append(f"{statement}: no test {test}")
            elif ran is not None and not entry.get("elsewhere") and not ran.get(test, False):
                misses.append(f"{statement}: {test} did not run, was skipped or failed")
        if not entry["tests"]:
            misses.append(f"{statement}: no test named")
    for miss in misses:
        print(miss)
    print(f"ledger: {len(ledger)} statements, {len(misses)} misses")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
