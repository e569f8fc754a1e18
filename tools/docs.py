"""The page of layouts: settings, the matrix as counted and as run, every refusal, pictures.

    python tools/docs.py [--check]

Writes docs/layouts.md and docs/pictures/ from the code itself and from bench/results/matrix-*.json;
--check only says whether they are up to date.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.core.refusals import CASES, MLA24, machine_of  # noqa: E402
from tests.matrix.cells import DRAWN, Census, attention_cells, dp_cells  # noqa: E402

from anabranch.cli.picture import paint  # noqa: E402
from anabranch.core.ask import Machine, Refusal  # noqa: E402
from anabranch.core.config import EngineConfig  # noqa: E402
from anabranch.core.resolve import resolve  # noqa: E402

PAGE = ROOT / "docs" / "layouts.md"
PICTURES = ROOT / "docs" / "pictures"
RUNS = ROOT / "bench" / "results"

DRAWINGS: dict[str, dict[str, int | str]] = {
    "tp4-dp2": {"tp": 4, "attn_dp": 2, "ep": 2},
    "tp4-cp2": {"tp": 4, "attn_cp": 2},
    "tp4-dcp4": {"tp": 4, "dcp": 4},
    "tp2-cp2-replicated-decode": {"tp": 2, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
    "tp8-dp2-cp2-dcp4-ep8": {"tp": 8, "attn_dp": 2, "attn_cp": 2, "dcp": 4, "ep": 8},
}

INTRODUCTION = """\
# Layouts

A model copy runs on `--tp P` ranks. Attention splits them into `--attn-dp R` replicas (each with
its own requests and KV) of `--attn-cp C` context-parallel ranks (a prompt's rows) of A = P / (R C)
attention-TP ranks (heads). The KV of a replica lies in `--dcp N` stripes: N = C * S with S dividing
A, or 1 (`--kv replicated`). The experts see the same ranks as `--ep E` groups, and the width of
each expert is cut over the P / E ranks of a group.

`rank = (dp * C + cp) * A + tp`. Position p of a request belongs to stripe `(p // I) % N`; the
stripe of a rank is `ts * C + cp` with `ts = tp % S`. Prefill rank (cp, tp) works on heads
`[tp * H/A, (tp + 1) * H/A)`; in decode it owns sub-slice cp of them. Nothing moves when a request
goes from prefill to decode: neither KV nor weights.

`anabranch layout MODEL [flags]` prints and draws this for a model; what cannot run is refused with
a code, the numbers and the nearest layout that can.
"""


def page() -> str:
    parts = [INTRODUCTION, pictures(), matrix(), runs(), refusals()]
    return "\n".join(parts)


def pictures() -> str:
    lines = ["## Pictures", ""]
    for name, flags in DRAWINGS.items():
        words = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in flags.items())
        lines += [f"`{words}`", "", f"![{words}](pictures/{name}.svg)", ""]
    return "\n".join(lines)


def matrix() -> str:
    """Accepted and refused cells by ranks, of both sets."""
    lines = [
        "## The matrix",
        "",
        "A cell is a combination of settings for one of three small models (MLA with 24 heads, GQA",
        "with 24 heads and 4 or 8 KV heads, both with 10 experts and a shared one). What",
        "`core.checks` lets through must give the logits of one process to 1e-4 and its greedy",
        "tokens.",
        "",
        "| set | ranks | asked | accepted | refused |",
        "|---|---|---|---|---|",
    ]
    refused: Counter[str] = Counter()
    sets = (
        ("R, C, A x stripes x ep x model x decode form x exchange x cp-split x kv-to-q",
         attention_cells),
        ("R, A x ep x model x shared experts x row moves x dispatch", dp_cells),
    )  # fmt: skip
    for name, cells in sets:
        for world in (1, 2, 4, 8):
            census = Census.of(cells([world]))
            accepted, no = len(census.accepted), census.refused.total()
            refused += census.refused
            lines.append(f"| {name} | {world} | {accepted + no} | {accepted} | {no} |")
    lines += ["", "Refused by reason: " + ", ".join(f"{c} {n}" for c, n in refused.most_common())]
    drawn = ", ".join(f"`--{k.replace('_', '-')}`" for k in DRAWN)
    lines += [
        "", f"Settings that a cell does not fix are drawn by its seeded hash: {drawn}.", "",
        "Each trial sends prompts of 1 to 2C + 1, 21, 130 and (in one of six) 1000 tokens at",
        "random steps, with aborts, scoring and logprobs; then prefixes of every length up to two",
        "logical pages and one; then second turns over generated tokens; then a step in which",
        "replicas have 1, 0, 37 and 5 rows. The workspace is 64 tokens, poison and trace are on.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def runs() -> str:
    """What was run in full or in part, on which machine."""
    lines = [
        "## Runs",
        "",
        "| command | machine | accepted | run | failed |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(RUNS.glob("matrix-*.json")):
        kept = json.loads(path.read_text())
        found = kept["result"]
        failed = found["failed"] if isinstance(found["failed"], int) else len(found["failed"])
        lines.append(
            f"| `{kept['command']}` | {kept['machine']} | {found['accepted']} | {found['run']} | "
            f"{failed} |"
        )
    return "\n".join([*lines, ""])


def refusals() -> str:
    lines = ["## Refusals", "", "| code | for example | message | nearest |", "|---|---|---|---|"]
    shown: set[str] = set()
    for code, flags, arch in CASES:
        if code in shown:
            continue
        shown.add(code)
        try:
            resolve(EngineConfig(**flags), arch, machine_of(code, flags))  # type: ignore[arg-type]
        except Refusal as refusal:
            words = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in flags.items())
            near = f"`{refusal.nearest}`" if refusal.nearest else ""
            lines.append(f"| `{code}` | `{words}` | {refusal.message} | {near} |")
        else:
            raise AssertionError(f"{code}: {flags} runs")
    return "\n".join([*lines, ""])


def draw(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, flags in DRAWINGS.items():
        config = EngineConfig(dtype="bfloat16", **flags)  # type: ignore[arg-type]
        paint(resolve(config, MLA24, Machine(memory=1 << 40)), folder / f"{name}.svg")


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        draw(PICTURES)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        draw(Path(scratch))
        wanted = {PAGE: text} | {PICTURES / p.name: p.read_text() for p in Path(scratch).iterdir()}
    stale = [p.name for p, body in wanted.items() if not p.is_file() or p.read_text() != body]
    if stale:
        print(f"out of date: {', '.join(stale)}; run python tools/docs.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
