"""Which reader a checkpoint needs."""

from pathlib import Path

from anabranch.weights.config import fp8_block, quant_method, read_config
from anabranch.weights.gguf_file import GGUFFile
from anabranch.weights.readers.base import Reader
from anabranch.weights.readers.dummy import DummyReader
from anabranch.weights.readers.gguf import GGUFReader
from anabranch.weights.readers.mxfp4 import Mxfp4Reader
from anabranch.weights.readers.renamed import RENAMED, RenamedReader
from anabranch.weights.readers.safetensors import SafetensorsReader


def open_reader(path: Path, load_format: str = "auto", seed: int = 0) -> Reader:
    """The reader of `path`: a folder with config.json, a .gguf or a .safetensors file.

    load_format dummy: random weights from `seed`; nothing but config.json need be there.
    """
    if load_format == "dummy":
        return DummyReader(seed)
    if load_format != "auto":
        raise ValueError(f"load_format {load_format!r}: wanted auto or dummy")
    if path.suffix == ".gguf":
        return GGUFReader(GGUFFile(path))
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ValueError(
            f"{path}: loading a pickle runs code from the file, so only safetensors and GGUF "
            "are read: convert it first"
        )
    if path.is_dir():
        config = read_config(path)
        reader: Reader = SafetensorsReader(path, fp8_block(path, config))
        if quant_method(config) == "mxfp4":
            reader = Mxfp4Reader(reader)
        listed = config.get("architectures")
        named = str(listed[0]) if isinstance(listed, list) and listed else ""
        return RenamedReader(reader, RENAMED[named]) if named in RENAMED else reader
    return SafetensorsReader(path)
