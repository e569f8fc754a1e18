"""A checkpoint's facts as the dict `core.read_arch` takes: from a folder or a GGUF. No torch."""

import json
from pathlib import Path

from anabranch.weights.gguf_file import GGUFFile
from anabranch.weights.gguf_names import released_config


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file; ValueError names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise ValueError(f"{path}: no such file") from e
    except (OSError, ValueError, RecursionError) as e:  # not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{path}: not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: wanted a JSON object, found {type(value).__name__}")
    return value


def read_config(path: Path) -> dict[str, object]:
    """config.json of a folder, or its equal made from a GGUF file's metadata.

    Ends of text that only generation_config.json lists are added to eos_token_id.
    """
    if path.is_file():
        return released_config(GGUFFile(path))
    config = read_json(path / "config.json")
    ends = _ends(path / "config.json", config)
    more = path / "generation_config.json"
    if more.is_file():
        ends += _ends(more, read_json(more))
        config["eos_token_id"] = list(dict.fromkeys(ends))
    return config


def _ends(file: Path, facts: dict[str, object]) -> list[int]:
    value = facts.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    ends = [end for end in found if type(end) is int]
    if len(ends) < len(found):
        wanted = "an integer or a list of integers"
        raise ValueError(f"{file}: eos_token_id: wanted {wanted}, found {value!r}")
    return ends


def quant_method(config: dict[str, object]) -> str | None:
    """What config.json says the weights are quantised by."""
    quant = config.get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    return None if method is None else str(method)


def fp8_block(path: Path, config: dict[str, object]) -> tuple[int, int]:
    """Rows and columns of an fp8 block (DeepSeek-V3's, unless config.json says otherwise).

    ValueError for quantisations that are not read.
    """
    quant = config.get("quantization_config")
    if quant is None or quant_method(config) == "mxfp4":
        return 128, 128
    method = quant.get("quant_method") if isinstance(quant, dict) else quant
    block = quant.get("weight_block_size") if isinstance(quant, dict) else None
    sizes = block if isinstance(block, list) else []
    if method != "fp8" or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(
            f"{path}: checkpoints quantised by {method!r} (weight_block_size {block!r}) are not "
            "read; known: fp8 with weight_block_size, mxfp4, GGUF, or no quantisation"
        )
    return sizes[0], sizes[1]
