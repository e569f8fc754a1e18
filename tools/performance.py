"""docs/performance.md from bench/results/*.json: what was measured, when, where, by which command.

    python tools/performance.py [--check]

A result file has date, machine, command and result: facts, and tables (lists of objects whose keys
are the columns, mostly one named rows). Its name is the section's title. `--check` fails if
the page is not what the files give.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
HEAD = """# Performance

What was measured, by which command, on which machine. The tables are made from
`bench/results/*.json` by `tools/performance.py`; nothing here is written by hand. Machines are
shared: compare ratios within a table, not figures of different tables.
"""
NEEDED = ("date", "machine", "command", "result")


def section(file: Path) -> str:
    """One result as Markdown. ValueError names the file and what it lacks."""
    found = json.loads(file.read_text())
    missing = [key for key in NEEDED if not found.get(key)]
    if missing:
        raise ValueError(f"{file.name}: has no {', '.join(missing)}")
    facts = dict(found["result"])
    tables = {key: facts.pop(key) for key in list(facts) if _is_table(facts[key])}
    load = f"; load {found['load']}" if "load" in found else ""
    lines = [f"## {file.stem.replace('-', ' ').capitalize()}", ""]
    lines += [f"{found['date']}, {found['machine']}{load}.", "", f"    {found['command']}"]
    if facts:
        lines += ["", ", ".join(f"{_words(k)} {_cell(v)}" for k, v in flat(facts).items()) + "."]
    for name, rows in tables.items():
        lines += ["", *([] if name == "rows" else [f"{_words(name).capitalize()}:", ""])]
        lines += table([flat(row) for row in rows])
    if found.get("note"):
        lines += ["", str(found["note"])]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, object]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(map(_words, columns)) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]


def flat(values: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Objects within objects as one level, their keys joined."""
    result: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{before}{key} ")
        else:
            result[before + key] = value
    return result


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _cell(value: object) -> str:
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(_cell(v) for v in value)
    return str(value)


def main(argv: list[str]) -> int:
    page = "\n".join([HEAD, *(section(file) for file in sorted(RESULTS.glob("*.json")))])
    if "--check" in argv:
        same = PAGE.is_file() and PAGE.read_text() == page
        print("docs/performance.md is " + ("as measured" if same else "not what the results give"))
        return 0 if same else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
