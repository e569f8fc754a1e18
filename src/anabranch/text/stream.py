"""Tokens to text while they arrive: whole characters only, stop strings found and cut.

Owns what may be shown when. Cost is O(1) amortised per character. Knows nothing of HTTP.
"""

import codecs
from collections.abc import Sequence

from anabranch.text.tokenizer import Tokenizer


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `matched` characters match so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fail = [0] * len(text)
        k = 0
        for i in range(1, len(text)):
            while k and text[i] != text[k]:
                k = self._fail[k - 1]
            k += text[i] == text[k]
            self._fail[i] = k

    def push(self, char: str) -> bool:
        """Advance by one character; True when the whole string has just been seen."""
        k = self.matched
        while k and char != self.text[k]:
            k = self._fail[k - 1]
        self.matched = k + (char == self.text[k])
        return self.matched == len(self.text)


class StopStrings:
    """Finds the stop string that completes first; holds back only what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        # longest first: of strings that complete at one character, the earliest begun wins
        self._patterns = [_Pattern(s) for s in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown now. After a match: `found` is set and nothing more comes."""
        if self.found is not None:
            return ""
        if not self._patterns:
            return text
        self._held += text
        for i in range(len(self._held) - len(text), len(self._held)):
            for pattern in self._patterns:
                if pattern.push(self._held[i]):
                    self.found = pattern.text
                    shown, self._held = self._held[: i + 1 - len(pattern.text)], ""
                    return shown
        keep = len(self._held) - max(p.matched for p in self._patterns)
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def finish(self) -> str:
        """The text ended without a stop string: what was held back."""
        shown, self._held = self._held, ""
        return shown


class TextStream:
    """The text of one generated sequence.

    length: characters decoded so far, held ones too (a token's offset is `length` before its push).
    shown: characters released so far. stop: the stop string that was found, or None.
    stops_after: tokens before which no stop string is looked for (min_tokens).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        stops_after: int = 0,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stops)
        self._stops_after = stops_after
        self._skip_special = skip_special
        self._tokens = 0
        self.length = 0
        self.shown = 0

    @property
    def stop(self) -> str | None:
        return self._stops.found

    @property
    def reach(self) -> int:
        """Characters once the unfinished one, if any, is whole: where the last token ends."""
        return self.length + bool(self._decoder.getstate()[0])

    def push(self, token: int) -> str:
        """The text that may be shown after this token, in whole characters."""
        self._tokens += 1
        return self._release(
            self._decoder.decode(self._tokenizer.token_bytes(token, self._skip_special))
        )

    def finish(self) -> str:
        """The end: an unfinished character becomes U+FFFD, held text is released."""
        text = self._release(self._decoder.decode(b"", final=True))
        rest = self._stops.finish()
        self.shown += len(rest)
        return text + rest

    def _release(self, text: str) -> str:
        self.length += len(text)
        shown = text if self._tokens <= self._stops_after else self._stops.push(text)
        self.shown += len(shown)
        return shown
