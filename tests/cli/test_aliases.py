"""Other engines' flags become ours, word for word; what has no counterpart is refused."""

import pytest

from anabranch.cli.aliases import AliasError, translate


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("serve m --tp 2", "serve m --tp 2"),
        ("serve --model-path m --tp-size 2", "serve m --tp 2"),
        ("serve m -tp 4 -dcp 2", "serve m --tp 4 --dcp 2"),
        ("serve m --tp 2 --enable-dp-attention --dp 2", "serve m --tp 2 --attn-dp 2"),
        ("serve m --dp 2 --tp 4 --enable-dp-attention", "serve m --tp 4 --attn-dp 2"),
        ("serve m --tp 4 --enable-dp-attention --attn-dp-size 2", "serve m --tp 4 --attn-dp 2"),
        ("serve m --tp 4 --enable-prefill-cp", "serve m --tp 4 --attn-cp 4"),
        ("serve m --tp 8 --enable-dp-attention --dp 2 --enable-prefill-context-parallel",
         "serve m --tp 8 --attn-dp 2 --attn-cp 4"),
        ("serve m --tp 8 --enable-prefill-cp --attn-cp-size 2", "serve m --tp 8 --attn-cp 2"),
        ("serve m --tp=8 --attn-cp=2 --enable-prefill-cp", "serve m --tp=8 --attn-cp=2"),
        ("serve m --cp-strategy zigzag", "serve m --cp-split zigzag"),
        ("serve m --cp-strategy=interleave", "serve m --cp-split interleaved"),
        ("serve m --enable-cp-decode-attn-tp", "serve m --decode-attn tp"),
        ("serve m --dcp-size 4 --dcp-comm-backend fi_a2a",
         "serve m --dcp 4 --dcp-exchange flashinfer"),
        ("serve m --dcp-comm-backend ag_rs", "serve m --dcp-exchange ag_rs"),
        ("serve m --dcp-replicate-q-proj", "serve m --dcp-q replicate"),
        ("serve m --enable-dp-lm-head", "serve m --lm-head replica"),
        ("serve m --chunked-prefill-size 512", "serve m --prefill-chunk 512"),
        ("serve m --chunked-prefill-size 511 --attn-cp 2",
         "serve m --attn-cp 2 --prefill-chunk 256"),
        ("serve m --context-length 4096", "serve m --max-model-len 4096"),
        ("serve m --disable-radix-cache", "serve m --no-prefix-cache"),
        ("serve m --mem-fraction-static 0.85", "serve m --kv-memory 85%"),
        ("serve m --gpu-memory-utilization 0.9", "serve m --kv-memory 90%"),
        ("serve m --tensor-parallel-size 2", "serve m --tp 2"),
        ("serve m --tensor-parallel-size 2 --data-parallel-size 4", "serve m --tp 8 --attn-dp 4"),
        ("serve m --data-parallel-size 2", "serve m --tp 2 --attn-dp 2"),
        ("serve m --decode-context-parallel-size 2 --cp-kv-cache-interleave-size 64",
         "serve m --dcp 2 --dcp-interleave 64"),
        ("serve m --tp 4 --enable-expert-parallel", "serve m --tp 4 --ep 4"),
        ("serve m --max-num-seqs 64 --max-num-batched-tokens 2048",
         "serve m --max-running 64 --prefill-chunk 2048"),
        ("serve m --dp 1", "serve m"),
        ("serve m --attn-dp=2 --dp 2 --enable-dp-attention", "serve m --attn-dp=2"),
        ("serve m --tp=2 --data-parallel-size 2", "serve m --tp 4 --attn-dp 2"),
        ("eval arithmetic --model-path m --tp-size 2", "eval arithmetic m --tp 2"),
        ("bench serve --model x --dp 2", "bench serve --model x --dp 2"),
        ("serve m --served-model-name x -- --dp 2", "serve m --served-model-name x -- --dp 2"),
        ("", ""),
    ],
)  # fmt: skip
def test_translation(theirs: str, ours: str) -> None:
    assert translate(theirs.split()) == ours.split()
    assert translate(ours.split()) == ours.split()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("serve m --dp 2", "whole copies"),
        ("serve m --dp-size=4 --tp 4", "--attn-dp 4"),
        ("serve m --trust-remote-code", "never run"),
        ("serve m --enable-dp-attention", "--dp N"),
        ("serve m --cp-strategy spiral", "zigzag"),
        ("serve m --dcp-comm-backend nccl", "ag_rs"),
        ("serve m --chunked-prefill-size -1", "above 0"),
        ("serve m --mem-fraction-static 2", "at most 1"),
        ("serve m --mem-fraction-static x", "share of memory"),
        ("serve m --tp-size", "needs a value"),
        ("serve m --dp two --enable-dp-attention", "not a number"),
        ("serve m --tp 6 --attn-dp 4 --enable-prefill-cp", "does not divide"),
        (
            "serve m --tp 4 --dp 2 --enable-dp-attention --attn-dp 4",
            "--dp sets --attn-dp.* 4 and 2",
        ),
        ("serve m --tp=2 --tp-size 4", "--tp-size sets --tp.* 2 and 4"),
        ("serve m --data-parallel-size 2 --attn-dp=4", "--data-parallel-size sets --attn-dp"),
        ("serve m --enable-cp-decode-attn-tp --decode-attn replicated", "tp and replicated"),
        ("serve m --tp 4 --ep 2 --enable-expert-parallel", "--enable-expert-parallel sets --ep"),
    ],
)
def test_refusals_say_why(words: str, reason: str) -> None:
    with pytest.raises(AliasError, match=reason):
        translate(words.split())


def test_the_argument_is_left_alone() -> None:
    words = ["serve", "--tp-size", "2"]
    translate(words)
    assert words == ["serve", "--tp-size", "2"]
