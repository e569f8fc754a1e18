"""Detokenising while tokens arrive: whole characters, stop strings, offsets."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import save_tiny

from anabranch.text.stream import StopStrings, TextStream
from anabranch.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tiny(tmp_path_factory.mktemp("tiny")))


TEXTS = [
    "the quick brown fox",
    "naïve café — 🦙🎉👩‍👩‍👧 日本語 мир",
    "é" * 30 + "🦙" * 5,
    " leading and trailing ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_are_whole_characters_and_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    deltas = [stream.push(token) for token in tokenizer.encode(text, False)]
    deltas.append(stream.finish())
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)
    assert stream.length == stream.shown == len(text)


def test_a_character_cut_off_by_the_end_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab 🦙", False)
    stream = TextStream(tokenizer)
    shown = "".join(stream.push(token) for token in ids[:-1])
    assert shown == "ab "
    assert stream.finish() == "�"


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b", False)
    stream = TextStream(tokenizer)
    assert "".join(stream.push(t) for t in ids) == "ab"
    stream = TextStream(tokenizer, skip_special=False)
    assert "".join(stream.push(t) for t in ids) == "a<|im_end|>b"


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string to complete, the longest if several do."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.randoms(use_true_random=False),
)
def test_stop_strings_equal_a_naive_search(text: str, stops: list[str], rng: random.Random) -> None:
    matcher, shown, at = StopStrings(stops), "", 0
    while at < len(text) and matcher.found is None:
        step = rng.randint(1, 5)
        shown += matcher.push(text[at : at + step])
        at += step
        if matcher.found is None:  # held back: only what may still become a stop string
            held = text[len(shown) : at]
            assert text[:at] == shown + held
            assert held == "" or any(s.startswith(held) and s != held for s in stops)
    if matcher.found is None:
        shown += matcher.finish()
    assert (shown, matcher.found) == naive(text, stops)


def test_nothing_of_a_stop_string_is_shown_over_token_borders(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox END of", False)
    assert len(tokenizer.encode("ox END", False)) > 2
    stream = TextStream(tokenizer, ["ox END"])
    shown = ""
    for token in ids:
        shown += stream.push(token)
        assert "the f".startswith(shown) or shown == "the f"
        if stream.stop:
            break
    assert (shown, stream.stop, stream.shown) == ("the f", "ox END", 5)


def test_min_tokens_delays_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the the the the", False)
    stream = TextStream(tokenizer, [" the"], stops_after=2)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        if stream.stop:
            break
    assert shown == "the the"


def test_what_is_held_does_not_grow_with_length(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["zzzz", "quick fox"])
    ids = tokenizer.encode("the quick ", False) * 5_000
    total = 0
    for token in ids:
        total += len(stream.push(token))
        assert stream.length - stream.shown < len("quick fox")
    assert total + len(stream.finish()) == 10 * 5_000
