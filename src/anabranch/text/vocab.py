"""GGUF vocabularies as `tokenizers` objects.

Owns the two kinds of llama.cpp vocabularies that language models use: "gpt2" (byte-level BPE, its
pre-tokenizer named by `tokenizer.ggml.pre`) and "llama" (SentencePiece BPE with byte fallback).
The patterns are those the named models' own tokenizers publish. Knows nothing of files or requests.
"""

from collections.abc import Mapping, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from anabranch.weights.gguf_file import Value

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL
)
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _MARKS + _TAIL
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _MARKS + _TAIL

# name -> split patterns, applied in order; every match is one isolated piece.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "deepseek-llm": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK),
}
_LLAMA3_NAMES = ("llama3", "llama-bpe", "llama-v3")


class GGUFVocab:
    """The `tokenizer.ggml.*` keys of a file, typed.

    tokens, types: token text and llama.cpp token type by id. bos, eos: ids or None.
    end_ids: every id that ends a turn or a text. add_bos: whether a text begins with bos.
    """

    def __init__(self, meta: Mapping[str, Value]) -> None:
        self._meta = meta
        kind = meta.get("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise ValueError(
                f"GGUF tokenizer kind {kind!r} is not supported; gpt2 (byte-level BPE) and llama "
                "(SentencePiece) are"
            )
        self.kind = kind
        self.pre = str(meta.get("tokenizer.ggml.pre", "default"))
        self.tokens = [str(token) for token in self._list("tokens")]
        types = [int(t) for t in self._list("token_type") if isinstance(t, int)]
        self.types = types or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ValueError(f"GGUF has {len(self.tokens)} tokens, {len(self.types)} token types")
        self.bos = self._id("bos_token_id")
        self.eos = self._id("eos_token_id")
        ends = (self.eos, self._id("eot_token_id"), self._id("eom_token_id"))
        self.end_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        default = kind == "llama" or self.pre in _LLAMA3_NAMES
        self.add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", default))

    def build(self) -> Tokenizer:
        """A `tokenizers.Tokenizer` that encodes and decodes as the model's own does."""
        built = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        specials = [AddedToken(t, special=True, normalized=False) for t in self._of(_CONTROL)]
        built.add_special_tokens(specials)
        built.add_tokens([AddedToken(t, normalized=False) for t in self._of(_USER_DEFINED)])
        if self.add_bos and self.bos is not None:
            bos = self.tokens[self.bos]
            built.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, self.bos)]
            )
        return built

    def _byte_level(self) -> Tokenizer:
        if self.pre not in _PATTERNS:
            raise ValueError(
                f"GGUF pre-tokenizer {self.pre!r} is not known; known: {', '.join(_PATTERNS)}"
            )
        merges: list[tuple[str, str]] = []
        for merge in self._list("merges"):
            left, _, right = str(merge).partition(" ")
            merges.append((left, right))
        vocab = {token: i for i, token in enumerate(self.tokens)}
        # Llama 3 takes a whole piece that is a token even where no merge path leads to it.
        model = models.BPE(vocab, merges, ignore_merges=self.pre in _LLAMA3_NAMES)
        built = Tokenizer(model)
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(p), "isolated") for p in _PATTERNS[self.pre]
        ]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
        built.decoder = decoders.ByteLevel()
        return built

    def _sentencepiece(self) -> Tokenizer:
        vocab = {token: i for i, token in enumerate(self.tokens)}
        unknown = self._id("unknown_token_id")
        model = models.BPE(
            vocab,
            self._score_merges(vocab),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        built = Tokenizer(model)
        prefix = bool(self._meta.get("tokenizer.ggml.add_space_prefix", True))
        prepend: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
        built.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        steps: list[decoders.Decoder] = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return built

    def _score_merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """SentencePiece joins the adjacent pair whose joined piece scores best: merges by score."""
        scores = [float(s) for s in self._list("scores") if isinstance(s, int | float)]
        if len(scores) != len(self.tokens):
            raise ValueError(f"GGUF has {len(self.tokens)} tokens and {len(scores)} scores")
        found: list[tuple[float, int, int, str, str]] = []
        for i, token in enumerate(self.tokens):
            if self.types[i] not in (_NORMAL, _UNUSED):
                continue
            for cut in range(1, len(token)):
                left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-scores[i], left, right, token[:cut], token[cut:]))
        found.sort()
        return [(left, right) for _, _, _, left, right in found]

    def _of(self, kind: int) -> list[str]:
        return [token for token, t in zip(self.tokens, self.types, strict=True) if t == kind]

    def _list(self, name: str) -> Sequence[Value]:
        value = self._meta.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list):
            raise ValueError(f"GGUF key tokenizer.ggml.{name} is not a list")
        return value

    def _id(self, name: str) -> int | None:
        value = self._meta.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ValueError(f"GGUF {name} {value!r} is no id below {len(self.tokens)}")
        return value
