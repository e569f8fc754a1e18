"""The size report: lines of Python per room, the longest files, the total against the budget.

python tools/size.py
"""

import ast
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "anabranch"
BUDGET = 12_000


def main() -> None:
    files = {p: len(p.read_text().splitlines()) for p in SRC.rglob("*.py")}
    rooms: dict[str, int] = {}
    for path, lines in files.items():
        parts = path.relative_to(SRC).parts
        room = parts[0] if len(parts) > 1 else "."
        rooms[room] = rooms.get(room, 0) + lines
    for room, lines in sorted(rooms.items(), key=lambda item: -item[1]):
        print(f"{lines:6} {room}")
    print(f"{sum(files.values()):6} of {BUDGET} lines of Python in {len(files)} files")
    longest = sorted(files.items(), key=lambda item: -item[1])[:5]
    print("longest files:", ", ".join(f"{p.relative_to(SRC)} {n}" for p, n in longest))
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    print(f"95th-percentile function {lengths[int(len(lengths) * 0.95)]} lines")


if __name__ == "__main__":
    main()
