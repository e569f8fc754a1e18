"""From what the user calls a model to where its files are. No torch."""

import re
from pathlib import Path

from anabranch.weights.catalog import CATALOGUE, fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# what an engine reads; pickles and other formats of the same weights stay where they are
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


def locate(model: str | None) -> Path:
    """The folder or .gguf file of `model`, fetched if need be.

    model: a folder with config.json, a .gguf file, a catalogue name, a hub id, or None for the
    packaged demo model. ValueError says what was looked for and what would help.
    """
    if model is None:
        return _folder(Path(__file__).parent.parent / "demo")
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: a model is a folder with config.json or a .gguf file")
        return path
    return pull(model)


def _folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(f"{path}: {len(files)} .gguf files; name one, such as {files[0]}")
    raise ValueError(f"{path}: no config.json in the folder")


def is_hub_id(name: str) -> bool:
    """Whether `name` can only mean a repository of the hub."""
    here = Path(name).expanduser().exists() or name in CATALOGUE
    return not here and _HUB_ID.fullmatch(name) is not None


def pull(name: str) -> Path:
    """Fetches a catalogue model or a hub id into its cache; returns where it is.

    Hub ids honour HF_HOME, HF_HUB_OFFLINE and HF_TOKEN (huggingface_hub).
    """
    if name in CATALOGUE:
        return fetch(name)
    if _HUB_ID.fullmatch(name) is None:
        raise ValueError(
            f"model {name!r}: no such folder or file, and neither a hub id (OWNER/NAME) nor one "
            f"of the catalogue: {', '.join(CATALOGUE)}"
        )
    # imported here: it costs a quarter of a second that local models need not pay
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return _folder(Path(snapshot_download(name, allow_patterns=_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        raise ValueError(
            f"model {name!r}: not in the hub's cache and could not be fetched: "
            f"{str(e).splitlines()[0]}; check the id and the network (HF_HUB_OFFLINE, HF_TOKEN), "
            f"or name a local folder, or one of the catalogue: {', '.join(CATALOGUE)}"
        ) from e
