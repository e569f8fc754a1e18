"""Tokenizers of folders and GGUF files against transformers and known models' own definitions."""

import json
import struct
from pathlib import Path

import pytest
from tiny_text import save_tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from anabranch.text.tokenizer import Tokenizer

SAMPLES = [
    "Hello world",
    "  two  spaces\n\n\ttabs and 12345 numbers 3.14",
    "naïve café — it's we'll I'D don't",
    "日本語テキスト 🦙🎉 мир العالم",
    "a\r\nb<|im_end|>c",
    "",
    " ",
    "x = [i**2 for i in range(10)]  # comment!!!",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_folder_equals_transformers(folder: Path) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == expected
    assert ours.vocab_size == len(theirs)


def test_end_ids_come_from_every_file_once(folder: Path) -> None:
    assert Tokenizer.load(folder).eos_ids == (0, 2)


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_add_bos_token_of_the_config_is_obeyed(folder: Path, has: bool, wanted: bool | None,
                                               tmp_path: Path) -> None:  # fmt: skip
    """DeepSeek's folders say add_bos_token, with a tokenizer.json that adds none."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if has:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|endoftext|>"}}
    config |= {} if wanted is None else {"add_bos_token": wanted}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    expected = has if wanted is None else wanted
    assert (ours.encode("hello")[:1] == [0]) is expected
    assert ours.encode("hello", add_special=False)[0] != 0


def test_token_text_of_part_of_a_character(folder: Path) -> None:
    ours = Tokenizer.load(folder)
    ids = ours.encode("🦙", False)
    assert [ours.token_text(i) for i in ids] == [
        "bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x99"
    ]  # fmt: skip
    assert b"".join(ours.token_bytes(i) for i in ids) == "🦙".encode()
    assert ours.token_bytes(10**6) == b""
    assert ours.token_text(2) == "<|im_end|>"
    assert ours.token_text(10**6) == "token_id:1000000"


def test_a_folder_without_a_tokenizer_still_has_end_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    ours = Tokenizer.without_text(tmp_path)
    assert (ours.eos_ids, ours.knows_text, ours.bos_id) == ((7,), False, None)
    assert ours.encode("hi") == [] and ours.decode([1, 2]) == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "no JSON object"),
        ({"tokenizer.json": None, "config.json": "{"}, "not JSON"),
    ],
)
def test_bad_folders_are_value_errors(
    folder: Path, tmp_path: Path, files: dict[str, str | None], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text((folder / name).read_text() if text is None else text)
    with pytest.raises(ValueError, match=words):
        Tokenizer.load(tmp_path)


def test_missing_path_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither"):
        Tokenizer.load(tmp_path / "nothing")


# -- GGUF ------------------------------------------------------------------------------------------


def write_gguf(path: Path, pairs: dict[str, object]) -> Path:
    """A file of metadata only, written from the specification."""

    def string(text: str) -> bytes:
        data = text.encode()
        return struct.pack("<Q", len(data)) + data

    def value(item: object) -> tuple[int, bytes]:
        if isinstance(item, bool):
            return 7, struct.pack("<?", item)
        if isinstance(item, int):
            return 4, struct.pack("<I", item)
        if isinstance(item, float):
            return 6, struct.pack("<f", item)
        if isinstance(item, str):
            return 8, string(item)
        assert isinstance(item, list)
        kind = value(item[0])[0] if item else 4
        return 9, struct.pack("<IQ", kind, len(item)) + b"".join(value(i)[1] for i in item)

    body = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, item in pairs.items():
        kind, data = value(item)
        body += string(key) + struct.pack("<I", kind) + data
    path.write_bytes(body)
    return path


def byte_level_pairs(backend: Backend, pre: str) -> dict[str, object]:
    state = json.loads(backend.to_str())
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    special = {t["content"] for t in state["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def original(pre: str) -> Backend:
    """The pre-tokenizers as the models' own tokenizer.json files have them, trained on samples."""
    backend = Backend(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        SAMPLES * 4,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default"])
def test_gguf_byte_level_equals_its_original(tmp_path: Path, pre: str) -> None:
    backend = original(pre)
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level_pairs(backend, pre)))
    for text in SAMPLES:
        assert ours.encode(text) == backend.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special=False) == text
    assert ours.eos_ids == (2, 1)
    assert ours.chat_template == "{{ messages[0].content }}"
    assert ours.special_tokens["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
        ("qwen2", "ab 123\n\n x", ["ab", " ", "1", "2", "3", "\n\n", " x"]),
        ("deepseek-v3", "12345 日本a !?", ["123", "45", " ", "日本", "a", " !?"]),
    ],
)
def test_pre_tokenizers_split_as_published(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    """With every piece a token of its own, ids show where the text was split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    pairs = byte_level_pairs(backend, pre)
    pairs["tokenizer.ggml.bos_token_id"] = 0
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))
    split = ours._backend.pre_tokenizer.pre_tokenize_str(text)
    spans = [text[a:b] for _, (a, b) in split]
    assert spans == pieces


def test_gguf_sentencepiece(tmp_path: Path) -> None:
    """Merges follow scores, unknown characters fall back to bytes, the first space is dropped."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w",
             "or", "▁wor", "ld", "▁world"]  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    pairs: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))
    assert [ours.token_text(i) for i in ours.encode("hello world")] == ["<s>", " hello", " world"]
    ids = ours.encode("hello é world")
    assert ours.decode(ids) == "hello é world"
    assert "".join(ours.token_bytes(i).decode("latin-1") for i in ids[2:5]) == " Ã©"
    assert ours.encode("hello", add_special=False)[0] != 1
    assert ours.strips_first_space


def test_sentencepiece_folder_equals_the_library(tmp_path: Path) -> None:
    """Metaspace tokenizers with byte fallback, as Llama 2's tokenizer.json has them."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator(["hello world, this is text."] * 10, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    for text in ("hello world", " two", "text."):
        ids = ours.encode(text)
        assert ours.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.pre": "never-heard"}, "never-heard.*smollm"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id 1000000"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
    ],
)
def test_bad_gguf_vocabularies_name_the_fault(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    pairs = byte_level_pairs(original("smollm"), "smollm") | change
    with pytest.raises(ValueError, match=words):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))


def test_a_truncated_gguf_is_a_value_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_pairs(original("smollm"), "smollm"))
    data = path.read_bytes()
    for size in (0, 3, 20, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            Tokenizer.load(path)
