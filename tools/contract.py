"""The import contract: a room imports only rooms below it, and some rooms never import torch.

    python tools/contract.py

Prints every breach and the number of imports checked; exit 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "anabranch"

BELOW: dict[str, set[str]] = {}
_order = [
    ({"layout"}, set()),
    ({"core"}, {"layout"}),
    ({"demo"}, set()),
    ({"device"}, {"core", "layout"}),
    ({"ops"}, {"core", "layout"}),
    ({"comm"}, {"core", "layout", "ops", "device"}),
    ({"kv"}, {"core", "layout", "ops", "device"}),
    ({"weights"}, {"core", "layout", "ops", "device"}),
    ({"nn"}, {"core", "layout", "ops", "device", "comm", "kv", "weights"}),
    ({"models"}, {"core", "layout", "ops", "device", "comm", "kv", "weights", "nn"}),
    ({"wire", "sched"}, {"core", "layout"}),
    (
        {"worker"},
        {"core", "layout", "ops", "device", "comm", "kv", "weights", "nn", "models", "wire"},
    ),
]
for _rooms, _below in _order:
    for _room in _rooms:
        BELOW[_room] = _below
BELOW["text"] = {"core", "layout", "weights"}
BELOW["engine"] = set(BELOW) - {"engine"}
BELOW["server"] = {"core", "layout", "engine", "text", "weights", "demo"}
BELOW["cli"] = set(BELOW)

TORCH_FREE = {"cli", "server", "text", "sched", "layout", "core", "wire", "engine", "demo"}
BY_MODULE_PATH = {"engine": {"worker", "models", "nn", "kv", "comm", "ops"}}
"""Rooms that use torch, which `engine` loads by module path only: it must start without torch."""

LOADED_BY_PATH = {"engine/ranks.py"}
"""Files that only processes running ranks load, by module path."""

TORCH_FREE_MODULES = {"anabranch.comm.endpoint", "anabranch.models.reads"}


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, at top level) of every import of a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module, id(node) in top


def breaches() -> Iterator[str]:
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).parts
        room = parts[0] if len(parts) > 1 else ""
        where = path.relative_to(SRC.parent.parent)
        for line, module, top in imports(path):
            if module.split(".")[0] == "torch" and room in TORCH_FREE and top:
                yield f"{where}:{line}: {room} must not import torch"
            if not module.startswith("anabranch.") or not room or module in TORCH_FREE_MODULES:
                continue
            other = module.split(".")[1]
            if other == room or other == "version":
                continue
            if other not in BELOW.get(room, set()):
                yield f"{where}:{line}: {room} imports {other}, which is not below it"
            elif (
                top
                and other in BY_MODULE_PATH.get(room, set())
                and path.relative_to(SRC).as_posix() not in LOADED_BY_PATH
            ):
                yield f"{where}:{line}: {room} must import {other} by module path only"


def main() -> int:
    found = list(breaches())
    for breach in found:
        print(breach)
    files = len(list(SRC.rglob("*.py")))
    print(f"import contract: {files} files, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
