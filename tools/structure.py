"""The structure page: one line a file, from the files' own docstrings, under the life of a request.

    python tools/structure.py [--check]

Writes docs/structure.md between its markers; --check only says whether it is up to date.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "anabranch"
PAGE = ROOT / "docs" / "structure.md"
START, END = "<!-- files -->\n", "<!-- end -->\n"

ROOMS = [
    "cli", "server", "text", "engine", "sched", "worker", "wire", "models", "nn", "weights", "kv",
    "comm", "ops", "device", "core", "layout", "demo",
]  # fmt: skip


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = next(
        (
            i + 1
            for i, c in enumerate(paragraph)
            if c == "." and paragraph[i + 1 : i + 2] in (" ", "")
        ),
        len(paragraph),
    )
    return paragraph[:end]


def listing() -> str:
    lines = []
    for room in ROOMS:
        files = sorted((SRC / room).rglob("*.py"))
        lines.append(f"\n### {room}/\n")
        for path in files:
            said = summary(path)
            if path.name == "__init__.py" and not said:
                continue
            lines.append(f"- `{path.relative_to(SRC)}`: {said}")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    page = PAGE.read_text()
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    new = head + START + listing() + END + tail
    if "--check" in argv:
        same = new == page
        print("docs/structure.md", "is up to date" if same else "differs: run tools/structure.py")
        return 0 if same else 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
