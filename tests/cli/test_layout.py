"""`anabranch layout`: text, JSON, refusals and pictures, without torch."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from anabranch.cli.main import run

FOLDER = Path(__file__).parent.parent.parent / "src/anabranch/demo"
MODEL = str(FOLDER)


def test_json_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "8", "--attn-dp", "2", "--attn-cp", "2", "--ep", "2"]
    assert run(["layout", MODEL, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world"] == 8 and found["axes"]["cp"] == 2 and found["kv_stripes"] == 2
    assert {m["verb"] for m in found["phases"]["moves"]} >= {"all_gather", "reduce_scatter"}
    assert run(["layout", MODEL, *flags]) == 0
    text = capsys.readouterr().out
    for word in ("8 ranks", "prefill", "decode", "reduce_scatter", "bytes a token"):
        assert word in text


def test_weights_shrink_with_ranks_and_kv_with_stripes(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*flags: str) -> dict[str, float]:
        assert run(["layout", MODEL, *flags, "--json"]) == 0
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    one, eight = ask(), ask("--tp", "8")
    assert one["weight_bytes_per_rank"] > 3 * eight["weight_bytes_per_rank"]
    whole, striped = ask("--tp", "4"), ask("--tp", "4", "--dcp", "4")
    assert whole["kv_copies"] == 4 and striped["kv_copies"] == 1
    assert whole["kv_bytes_per_token_per_rank"] == 4 * striped["kv_bytes_per_token_per_rank"]


def test_a_refusal_exits_2_with_code_numbers_and_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["layout", MODEL, "--tp", "4", "--attn-dp", "2", "--dcp", "4", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "stripes_cross_replicas"
    assert error["numbers"] == {"dcp": 4, "replica_ranks": 2, "attn_dp": 2}
    assert error["nearest"] == "--tp 4 --attn-dp 2 --attn-cp 1 --dcp 2"


@pytest.mark.parametrize("flags", [
    ["--tp", "8", "--attn-dp", "2", "--attn-cp", "2"],
    ["--tp", "8", "--attn-dp", "8", "--ep", "8", "--moe-dispatch", "a2a"],
    ["--tp", "4", "--attn-cp", "2", "--dcp", "4", "--cp-split", "interleaved"],
    ["--tp", "2", "--attn-cp", "2", "--dcp", "1", "--decode-attn", "replicated"],
    [],
])  # fmt: skip
def test_pictures(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layout.svg"
    assert run(["layout", MODEL, *flags, "--draw", str(path)]) == 0
    root = ET.fromstring(path.read_text())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    words = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    world = int(flags[1]) if flags else 1
    assert [w for w in words if w.startswith("rank ")] == [f"rank {r}" for r in range(world)]
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if "x" in box.attrib:
            assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"]) + 1
            assert 0 <= float(box.attrib["y"]) <= height - float(box.attrib["height"])


def test_png_or_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "layout.png"
    assert run(["layout", MODEL, "--tp", "2", "--draw", str(path)]) == 0
    with Image.open(path) as picture:
        assert picture.width == 2480
    assert run(["layout", MODEL, "--draw", str(tmp_path / "layout.gif")]) == 2
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert run(["layout", MODEL, "--draw", str(path)]) == 2


def test_no_torch() -> None:
    code = (
        "import sys; from anabranch.cli.main import run; "
        f"run(['layout', {MODEL!r}, '--tp', '2', '--json']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
