"""Other engines' flags, translated to ours.

One pure function over words: SGLang's and vLLM's spellings become the plain flags of the frozen
list, before any parser sees them. Owns spellings only; whether a combination can run is
`core.resolve`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class AliasError(ValueError):
    """A foreign flag that cannot be translated; the message says why and what to write."""


# same value, our name
_RENAMED = {
    "--tp-size": "--tp",
    "-tp": "--tp",
    "--tensor-parallel-size": "--tp",
    "--attn-dp-size": "--attn-dp",
    "--attn-cp-size": "--attn-cp",
    "--dcp-size": "--dcp",
    "-dcp": "--dcp",
    "--decode-context-parallel-size": "--dcp",
    "--context-length": "--max-model-len",
    "--max-num-seqs": "--max-running",
    "--cp-kv-cache-interleave-size": "--dcp-interleave",
    "--dcp-kv-cache-interleave-size": "--dcp-interleave",
}
# no value, our flag with its value
_SETTINGS = {
    "--enable-cp-decode-attn-tp": ("--decode-attn", "tp"),
    "--dcp-replicate-q-proj": ("--dcp-q", "replicate"),
    "--enable-dp-lm-head": ("--lm-head", "replica"),
}
# no value here either
_SWITCHES = {"--disable-radix-cache": "--no-prefix-cache"}
_VALUES = {
    "--dcp-comm-backend": (
        "--dcp-exchange",
        {"ag_rs": "ag_rs", "a2a": "a2a", "fi_a2a": "flashinfer"},
    ),
    "--cp-strategy": (
        "--cp-split",
        {
            "zigzag": "zigzag",
            "in-seq-split": "zigzag",
            "interleave": "interleaved",
            "interleaved": "interleaved",
            "round-robin-split": "interleaved",
        },
    ),
}
# kept aside: they are translated together, once all sizes are known
_HELD_SWITCHES = (
    "--enable-dp-attention",
    "--enable-prefill-cp",
    "--enable-prefill-context-parallel",
    "--enable-expert-parallel",
)
_HELD_VALUES = (
    "--dp",
    "--dp-size",
    "--data-parallel-size",
    "--chunked-prefill-size",
    "--max-num-batched-tokens",
    "--mem-fraction-static",
    "--gpu-memory-utilization",
    "--model-path",
    "--model",
)


@dataclass
class _Words:
    """Plain words so far, and what is held back: flag -> its value ("" for a switch)."""

    plain: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    """Our flag -> the foreign one that set it."""

    def values(self, name: str) -> list[str]:
        """What one of our own flags is given among the words, in order."""
        found = []
        for word, value in zip(self.plain, [*self.plain[1:], ""], strict=True):
            flag, glued, own = word.partition("=")
            if flag == name:
                found.append(own if glued else value)
        return found

    def size(self, name: str) -> int | None:
        """The value of one of our own size flags, if it is among the words and a number."""
        numbers = [int(v) for v in self.values(name) if v.lstrip("-").isdigit()]
        return numbers[-1] if numbers else None

    def put(self, name: str, value: object, foreign: str) -> None:
        """Set a flag of ours, as the flag `foreign` says."""
        if str(value) not in self.values(name):
            self.plain += [name, str(value)]
        self.said[name] = foreign

    def multiply(self, name: str, factor: int) -> None:
        """Set a size flag of ours to `factor` times what it is, or to `factor`."""
        size = self.size(name) or 1
        self.agree()
        while name in (flags := [word.partition("=")[0] for word in self.plain]):
            at = flags.index(name)
            del self.plain[at : at + (1 if "=" in self.plain[at] else 2)]
        self.plain += [name, str(size * factor)]

    def agree(self) -> None:
        """AliasError where a foreign flag and another one set the same to different values."""
        for name, foreign in self.said.items():
            values = list(dict.fromkeys(self.values(name)))
            if len(values) > 1:
                raise AliasError(
                    f"{foreign} sets {name}, which is given twice: {' and '.join(values)}; "
                    "give one of them"
                )

    def number(self, *names: str) -> int | None:
        """The value of a held flag, as an integer."""
        for name in names:
            if name in self.held:
                text = self.held[name]
                if not text.lstrip("-").isdigit():
                    raise AliasError(f"{name}: {text!r} is not a number")
                return int(text)
        return None


def translate(argv: Sequence[str]) -> list[str]:
    """Words with every foreign flag in our spelling; the same list when there is none.

    AliasError: `--trust-remote-code`, whole-model data parallelism, values without a counterpart.
    """
    words = _Words()
    rest = list(argv)
    if rest[:1] == ["bench"]:  # drives any server: it has no engine flags, and a --model of its own
        return rest
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*_finish(words), "--", *rest]
        name, glued, value = word.partition("=")
        if name == "--trust-remote-code":
            raise AliasError(
                "--trust-remote-code is refused: code from a checkpoint is never run here; "
                "models are built in (an unknown architecture is refused with the known ones)"
            )

        def take(flag: str = name, has: str = glued, given: str = value) -> str:
            if has:
                return given
            if not rest:
                raise AliasError(f"{flag} needs a value")
            return rest.pop(0)

        if not _known(words, name, take):
            words.plain.append(word)
    return _finish(words)


def _known(words: _Words, name: str, take: Callable[[], str]) -> bool:
    """Translate or hold one foreign flag; False if the word is not one."""
    if name in _RENAMED:
        words.put(_RENAMED[name], take(), name)
    elif name in _SETTINGS:
        words.put(*_SETTINGS[name], name)
    elif name in _SWITCHES:
        words.plain.append(_SWITCHES[name])
    elif name in _VALUES:
        ours, table = _VALUES[name]
        value = take()
        if value not in table:
            raise AliasError(f"{name} {value}: known are {', '.join(table)}")
        words.put(ours, table[value], name)
    elif name in _HELD_SWITCHES:
        words.held[name] = ""
    elif name in _HELD_VALUES:
        words.held[name] = take()
    else:
        return False
    return True


def _finish(words: _Words) -> list[str]:
    _data_parallel(words)
    _context_parallel(words)
    if "--enable-expert-parallel" in words.held:
        words.put("--ep", words.size("--tp") or 1, "--enable-expert-parallel")
    _chunk(words)
    for name in ("--mem-fraction-static", "--gpu-memory-utilization"):
        if name in words.held:
            words.put("--kv-memory", _percent(name, words.held[name]), name)
    for name in ("--model-path", "--model"):
        if name in words.held:
            # MODEL stands behind the command's name (two words for `eval arithmetic`)
            words.plain.insert(2 if words.plain[:1] == ["eval"] else 1, words.held[name])
    words.agree()
    return words.plain


def _data_parallel(words: _Words) -> None:
    copies = words.number("--data-parallel-size")
    if copies is not None:
        # vLLM: the attention of each replica is tensor-parallel over tp ranks of its own
        words.multiply("--tp", copies)
        words.put("--attn-dp", copies, "--data-parallel-size")
        return
    replicas = words.number("--dp", "--dp-size")
    if "--enable-dp-attention" in words.held:
        if replicas is not None:
            words.put("--attn-dp", replicas, "--dp")
        elif words.size("--attn-dp") is None:
            raise AliasError("--enable-dp-attention needs --dp N, the number of attention replicas")
    elif replicas is not None and replicas != 1:
        raise AliasError(
            f"--dp {replicas} alone means {replicas} whole copies of the model, which are not "
            f"served by one command; add --enable-dp-attention (or write --attn-dp {replicas}) "
            "for attention replicas over shared experts"
        )


def _context_parallel(words: _Words) -> None:
    asked = any(
        n in words.held for n in ("--enable-prefill-cp", "--enable-prefill-context-parallel")
    )
    if asked and words.size("--attn-cp") is None:
        ranks, replicas = words.size("--tp") or 1, words.size("--attn-dp") or 1
        if ranks % replicas:
            raise AliasError(f"--tp {ranks} does not divide into {replicas} attention replicas")
        words.put("--attn-cp", ranks // replicas, "--enable-prefill-cp")


def _chunk(words: _Words) -> None:
    """Other engines count a chunk's tokens in all, `--prefill-chunk` the rows of each cp rank."""
    for name in ("--chunked-prefill-size", "--max-num-batched-tokens"):
        tokens = words.number(name)
        if tokens is None:
            continue
        if tokens < 1:
            raise AliasError(f"{name} {tokens}: prefill is always chunked; give a size above 0")
        ranks = max(words.size("--attn-cp") or 1, 1)
        words.put("--prefill-chunk", -(-tokens // ranks), name)


def _percent(name: str, text: str) -> str:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise AliasError(f"{name} {text}: a share of memory above 0 and at most 1")
    return f"{share * 100:g}%"
