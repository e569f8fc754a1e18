"""Trains the demo model's tokenizer: byte-level BPE, digits single. Run once, then committed.

    PYTHONPATH=src python -m training.tokenizer

Writes tokenizer.json, tokenizer_config.json and generation_config.json into the package.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from anabranch.demo import chat, problems

VOCABULARY = 2048
BEGIN, END, PAD, USER, ASSISTANT, SYSTEM = SPECIAL = (
    "<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>",
)  # fmt: skip
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "anabranch" / "demo"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'system' %}"
    "{{ '<|system|>' + message['content'] }}"
    "{% else %}"
    "{{ '<|user|>' + message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(count: int) -> Iterator[str]:
    """Texts to learn merges from; the held-out split is not among them."""
    for problem in problems.problems("train", count, seed=0):
        yield problem.question
        yield problem.solution
    for said, answer in itertools.islice(chat.turns(0), count // 40):
        yield said
        yield answer
    yield from chat.SYSTEM_PROMPTS * 20


def train(count: int = 60_000) -> Tokenizer:
    """A byte-level BPE tokenizer; at most VOCABULARY entries, fewer if the words run out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(count), trainer)
    return tokenizer


def main() -> None:
    tokenizer = train()
    tokenizer.save(str(PACKAGE / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}
    for name, content in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
    ):
        (PACKAGE / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
