"""Token ids <-> text for a checkpoint folder or a GGUF file.

Owns which ids end a text, which are special, and the bytes of every token. Knows nothing of
requests, templates' language or the engine. Never imports torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from anabranch.text.vocab import GGUFVocab
from anabranch.weights.gguf_file import GGUFFile

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: printable Latin-1 itself, the rest from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    moved = (b for b in range(256) if chr(b) not in table)
    table.update({chr(256 + i): b for i, b in enumerate(list(moved))})
    return table


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """One checkpoint's tokenizer.

    eos_ids: every id that ends generation. bos_id: the id a text begins with, or None.
    special_tokens: name ("bos_token", "eos_token", ...) -> text, as chat templates see them.
    chat_template: the checkpoint's Jinja source, or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ) -> None:
        self._backend = backend
        self.eos_ids = tuple(eos_ids)
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        bos = special_tokens.get("bos_token")
        self.bos_id: int | None = backend.token_to_id(bos) if bos is not None else None
        self._add_bos = add_bos
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._byte_level, self.strips_first_space = _decoder_kind(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a checkpoint folder or a `.gguf` file. ValueError names what is missing."""
        path = Path(path)
        if path.is_dir():
            return _from_folder(path)
        if path.suffix == ".gguf" and path.is_file():
            return _from_gguf(path)
        raise ValueError(f"{path}: neither a checkpoint folder nor a .gguf file")

    @classmethod
    def without_text(cls, folder: Path) -> "Tokenizer":
        """For a folder that has no tokenizer: end ids only; it encodes and decodes nothing."""
        backend = Backend(BPE())
        backend.decoder = ByteLevel()
        return cls(backend, eos_ids=_folder_eos(folder), special_tokens={})

    @property
    def knows_text(self) -> bool:
        return self.vocab_size > 0

    @property
    def vocab_size(self) -> int:
        """Ids known to the tokenizer, added ones too (the model's head may have more rows)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special`, as the model expects a text to begin.

        Releases the interpreter lock while it works (only the batched call of the library does),
        so a long prompt in a thread does not stop an event loop.
        """
        found = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = found[0].ids
        if add_special and self._add_bos is not None and self.bos_id is not None:
            begins = bool(ids) and ids[0] == self.bos_id and not self._starts_with_bos(text)
            if self._add_bos and not begins:
                ids = [self.bos_id, *ids]
            elif not self._add_bos and begins:
                ids = ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(i, skip_special) for i in ids)
        if self.strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        """The bytes a token adds to a text; b"" for ids outside the vocabulary."""
        if skip_special and token in self._special:
            return b""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._token_bytes(token)
        return found

    def token_text(self, token: int) -> str:
        """A token on its own, as logprobs show it.

        One that is no UTF-8 is shown as `bytes:\\xe2\\x82`, one without text as `token_id:5`.
        """
        data = self.token_bytes(token)
        if not data:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF.get(c) for c in text]
            known = [v for v in values if v is not None]
            return bytes(known) if len(known) == len(values) else text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("▁", " ").encode()

    def _starts_with_bos(self, text: str) -> bool:
        return self.bos_id is not None and text.startswith(self.special_tokens["bos_token"])


def _decoder_kind(backend: Backend) -> tuple[bool, bool]:
    """(byte-level?, does a decoded text lose its first space?). ValueError for other kinds."""
    if backend.decoder is None:
        raise ValueError("the tokenizer has no decoder; it must be byte-level or SentencePiece")
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        space = steps[kinds.index("Metaspace")]
        return False, space.get("prepend_scheme", "always") != "never"
    if "Replace" in kinds and "ByteFallback" in kinds:
        return False, "Strip" in kinds
    raise ValueError(
        f"a tokenizer with decoder {kinds} is not supported; byte-level and SentencePiece ones are"
    )


def _read_json(path: Path) -> dict[str, Json]:
    if not path.is_file():
        return {}
    try:
        found: Json = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return found


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder}: no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: cannot be read as a tokenizer ({error})") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    eos = _folder_eos(folder)
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if own is not None:
        eos.append(own)
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend,
        eos_ids=tuple(dict.fromkeys(eos)),
        special_tokens=special,
        chat_template=_folder_template(folder, config),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _folder_eos(folder: Path) -> list[int]:
    """End ids that the folder's configuration files name."""
    eos: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        for item in found if isinstance(found, list) else [found]:
            if isinstance(item, int) and not isinstance(item, bool):
                eos.append(item)
    return eos


def _special_tokens(*sources: Mapping[str, Json]) -> dict[str, str]:
    """Names ending in `_token` whose value is a string or an AddedToken object."""
    found: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found.setdefault(name, text)
    return found


def _folder_template(folder: Path, config: Mapping[str, Json]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _from_gguf(path: Path) -> Tokenizer:
    meta = GGUFFile(path).metadata
    vocab = GGUFVocab(meta)
    special: dict[str, str] = {}
    for name, token in (("bos_token", vocab.bos), ("eos_token", vocab.eos)):
        if token is not None:
            special[name] = vocab.tokens[token]
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(
        vocab.build(),
        eos_ids=vocab.end_ids,
        special_tokens=special,
        chat_template=template if isinstance(template, str) else None,
    )
