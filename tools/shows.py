"""What each part of the product must show, measured: one JSON line per statement.

    python tools/shows.py NAME [--only WORD]

NAME is engine, demo, ranks or context. Each line has name, measured, wanted, ok, seconds; a skip
is a miss. Exit 0 only if every line is ok. Runs from a checkout, with the Python that runs this.
"""

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "src")]

from anabranch.comm.endpoint import EXTENSION  # noqa: E402
from tools.showing.line import Line  # noqa: E402

NAMES = ("engine", "demo", "ranks", "context")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in NAMES:
        print(f"usage: python tools/shows.py {{{','.join(NAMES)}}} [--only WORD]")
        return 2
    if importlib.util.find_spec(EXTENSION) is None:
        print("no compiled ops beside the sources: pip install -e '.[test]' in this checkout first")
        return 2
    word = argv[argv.index("--only") + 1] if "--only" in argv else ""
    lines: list[Line] = importlib.import_module(f"tools.showing.{argv[0]}").LINES
    good = True
    for line in lines:
        if word not in line.name:
            continue
        start = time.monotonic()
        try:
            measured, ok = line.run()
        except Exception as error:  # a line that cannot run is a miss, and the others still run
            measured, ok = {"error": f"{type(error).__name__}: {error}"[:500]}, False
        seconds = round(time.monotonic() - start, 1)
        row = {"name": line.name, "measured": measured, "wanted": line.wanted, "ok": ok}
        print(json.dumps({**row, "seconds": seconds}), flush=True)
        good = good and ok
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
