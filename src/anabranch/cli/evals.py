"""`anabranch eval`: questions to a model, scores with intervals, a report of the misses.

Owns the tasks and what is reported. Any OpenAI-compatible server will do, or MODEL is loaded for
the run; the score functions are in `scoring`.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from anabranch.cli import scoring
from anabranch.cli.front import client, model_name, post
from anabranch.cli.generate import choice_text, first_choice, in_parallel
from anabranch.cli.lines import lines_of
from anabranch.core.config import EngineConfig
from anabranch.demo.problems import Split, extract_answer, problems
from anabranch.text.tokenizer import Json, Tokenizer
from anabranch.weights.locate import locate

_SPLITS: tuple[Split, ...] = ("new-numbers", "held-out")
_ARITHMETIC_TOKENS = 400  # the longest solution has 300 characters
_GSM8K_TOKENS = 256  # lm-evaluation-harness's default
_GSM8K_STOPS: list[Json] = ["Question:", "</s>", "<|im_end|>"]
Body = dict[str, Json]


@dataclass(frozen=True)
class Run:
    """Where to evaluate and where results go. compare: two servers instead of one."""

    config: EngineConfig
    url: str | None
    key: str | None
    name: str | None
    concurrency: int
    json: Path | None = None
    misses: Path | None = None
    compare: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """ValueError unless results can be written where they shall go: before the work, not
        after it."""
        for flag, path in (("--json", self.json), ("--misses", self.misses)):
            try:
                if path is not None:
                    path.open("a").close()
            except OSError as error:
                raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class Item:
    """One question. judge: name of a score -> does this answer count?"""

    group: str
    question: str
    expected: str
    path: str
    body: Body
    judge: Callable[[str], dict[str, bool]]


@dataclass(frozen=True)
class Answer:
    """What came back; `seconds` from sending to the whole answer."""

    text: str
    tokens: tuple[int, ...] | None
    completion_tokens: int
    seconds: float
    right: dict[str, bool]


def arithmetic(run: Run, n: int, seed: int) -> int:
    """Generated problems, `n` of each split; JSON has accuracy (new numbers), n, ci95, by_split."""
    items = [_problem_item(split, p.question, p.answer) for split in _SPLITS
             for p in problems(split, n, seed)]  # fmt: skip
    if run.compare is not None:
        return _compare(run, items, "correct")
    name, answers, seconds = asyncio.run(_ask_all(run, run.url, items))
    by_split: dict[str, Json] = {}
    for split in _SPLITS:
        rights = [a.right["correct"] for i, a in zip(items, answers, strict=True)
                  if i.group == split]  # fmt: skip
        by_split[split] = _share(rights)
    main = by_split[_SPLITS[0]]
    assert isinstance(main, dict)
    result = {**_facts("arithmetic", name, answers, seconds), **main, "by_split": by_split}
    for label, share in by_split.items():
        print(f"{label:12} {_words(share)}")
    _write(run, result, items, answers, "correct")
    return 0


def gsm8k(run: Run, data: Path, shots: int, shots_data: Path | None, n: int | None) -> int:
    """Strict and flexible accuracy over the questions of a file."""
    rows = _rows(data, "question", "answer")
    examples = _rows(shots_data, "question", "answer") if shots_data is not None else rows
    if len(examples) < shots:
        raise ValueError(f"{shots_data or data}: {len(examples)} rows, --shots asks for {shots}")
    if shots_data is None:
        rows = rows[shots:]  # an example is not a question
    head = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in examples[:shots])
    items = [_gsm8k_item(head, question, answer) for question, answer in rows[:n]]
    if not items:
        raise ValueError(f"{data}: no questions are left beside {shots} examples")
    if run.compare is not None:
        return _compare(run, items, "flexible")
    name, answers, seconds = asyncio.run(_ask_all(run, run.url, items))
    strict = _share([a.right["strict"] for a in answers])
    flexible = _share([a.right["flexible"] for a in answers])
    result = {
        **_facts("gsm8k", name, answers, seconds),
        **strict,
        "shots": shots,
        "strict": strict,
        "flexible": flexible,
    }
    print(f"strict   {_words(strict)}\nflexible {_words(flexible)}")
    _write(run, result, items, answers, "flexible")
    return 0


def perplexity(run: Run, data: Path, window: int, tokenizer: Path | None) -> int:
    """exp of the mean negative logprob over all windows, each without its first token."""
    texts = _texts(data)
    prompts: list[Json] = list(texts)
    if run.url is None or tokenizer is not None:
        found = Tokenizer.load(tokenizer or locate(run.config.model))
        prompts = [part for text in texts for part in _windows(found.encode(text), window)]

    async def work() -> tuple[str, list[tuple[float, int]]]:
        async with client(run.url, run.key, run.config) as http:
            name = await model_name(http, run.name)

            async def one(prompt: Json) -> tuple[float, int]:
                return await _logprob_sum(http, name, prompt)

            return name, await in_parallel(one, prompts, run.concurrency, "perplexity")

    begin = time.perf_counter()
    name, sums = asyncio.run(work())
    tokens = sum(count for _, count in sums)
    value = scoring.perplexity(sum(s for s, _ in sums), tokens)
    result: Body = {
        "task": "perplexity",
        "model": name,
        "perplexity": value,
        "tokens": tokens,
        "windows": len(prompts),
        "seconds": time.perf_counter() - begin,
    }
    print(f"perplexity {value:.4f} over {tokens} tokens in {len(prompts)} windows")
    _save(run, result)
    return 0


def _problem_item(split: str, question: str, expected: str) -> Item:
    body: Body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _ARITHMETIC_TOKENS,
        "temperature": 0,
    }

    def judge(text: str) -> dict[str, bool]:
        return {"correct": extract_answer(text) == expected}

    return Item(split, question, expected, "/v1/chat/completions", body, judge)


def _gsm8k_item(head: str, question: str, answer: str) -> Item:
    body: Body = {
        "prompt": f"{head}Question: {question}\nAnswer:",
        "max_tokens": _GSM8K_TOKENS,
        "temperature": 0,
        "stop": _GSM8K_STOPS,
    }

    def judge(text: str) -> dict[str, bool]:
        return {
            "strict": scoring.gsm8k_correct(scoring.strict_answer(text), answer),
            "flexible": scoring.gsm8k_correct(scoring.flexible_answer(text), answer),
        }

    return Item("gsm8k", question, scoring.normalised(answer), "/v1/completions", body, judge)


async def _ask_all(
    run: Run, url: str | None, items: Sequence[Item]
) -> tuple[str, list[Answer], float]:
    """(model, answers in order, seconds of the whole run)."""
    async with client(url, run.key, run.config) as http:
        name = await model_name(http, run.name)
        extras = await _extras(http)

        async def one(item: Item) -> Answer:
            begin = time.perf_counter()
            reply = await post(http, item.path, {"model": name, **item.body, **extras})
            return _answer(item, reply, time.perf_counter() - begin)

        begin = time.perf_counter()
        answers = await in_parallel(one, items, run.concurrency, "answering")
        return name, answers, time.perf_counter() - begin


async def _extras(http: httpx.AsyncClient) -> Body:
    """Servers known to return token ids are asked for them; others would refuse the field."""
    reply = await http.get("/v1/models")
    owners = {model.get("owned_by") for model in reply.json().get("data", [])}
    return {"return_token_ids": True} if owners & {"anabranch", "vllm"} else {}


def _answer(item: Item, reply: Body, seconds: float) -> Answer:
    choice, usage = first_choice(reply), reply.get("usage")
    ids = choice.get("token_ids")
    tokens = tuple(i for i in ids if isinstance(i, int)) if isinstance(ids, list) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    text = choice_text(choice)
    return Answer(text, tokens, count if isinstance(count, int) else 0, seconds, item.judge(text))


def _compare(run: Run, items: Sequence[Item], score: str) -> int:
    """Exit code 0 if the two servers' answers do not differ beyond chance (McNemar p >= 0.05)."""
    assert run.compare is not None, "compare without servers"
    a_url, b_url = run.compare
    _, first, _ = asyncio.run(_ask_all(run, a_url, items))
    _, second, _ = asyncio.run(_ask_all(run, b_url, items))
    pairs = list(zip(first, second, strict=True))
    ids = all(a.tokens is not None and b.tokens is not None for a, b in pairs)
    equal = sum((a.tokens == b.tokens) if ids else (a.text == b.text) for a, b in pairs)
    only_a = sum(a.right[score] and not b.right[score] for a, b in pairs)
    only_b = sum(b.right[score] and not a.right[score] for a, b in pairs)
    p = scoring.mcnemar(only_a, only_b)
    n = len(pairs)
    result: Body = {
        "task": "compare",
        "a": {"url": a_url, **_share([a.right[score] for a, _ in pairs])},
        "b": {"url": b_url, **_share([b.right[score] for _, b in pairs])},
        "n": n,
        "compared": "token ids" if ids else "texts",
        "equal": equal,
        "only_a_right": only_a,
        "only_b_right": only_b,
        "p": p,
    }
    print(f"equal {result['compared']}: {equal} of {n}")
    print(f"right: {a_url} {_words(result['a'])}\n       {b_url} {_words(result['b'])}")
    print(f"only the first right {only_a}, only the second {only_b}: McNemar p = {p:.4g}")
    _save(run, result)
    return 0 if p >= 0.05 else 1


def _facts(task: str, name: str, answers: Sequence[Answer], seconds: float) -> Body:
    tokens = sum(a.completion_tokens for a in answers)
    return {
        "task": task,
        "model": name,
        "seconds": seconds,
        "output_tok_s": tokens / seconds,
        "mean_running": sum(a.seconds for a in answers) / seconds,
    }


def _share(rights: Sequence[bool]) -> Body:
    n, correct = len(rights), sum(rights)
    low, high = scoring.wilson(correct, n)
    return {"accuracy": correct / n if n else 0.0, "n": n, "correct": correct, "ci95": [low, high]}


def _words(share: Json) -> str:
    assert isinstance(share, dict)
    interval = share["ci95"]
    assert isinstance(interval, list)
    low, high = interval
    return f"{share['accuracy']:.3f} ({share['correct']}/{share['n']}, 95% {low:.3f}..{high:.3f})"


def _write(
    run: Run, result: Body, items: Sequence[Item], answers: Sequence[Answer], score: str
) -> None:
    missed = [(i, a) for i, a in zip(items, answers, strict=True) if not a.right[score]]
    _save(run, result)
    if run.misses is not None:
        parts = [f"[{i.group}] {i.question}\nexpected {i.expected}\nanswered:\n{a.text}\n"
                 for i, a in missed]  # fmt: skip
        head = f"{len(missed)} misses of {len(items)}\n\n"
        run.misses.write_text(head + "\n".join(parts), encoding="utf-8")


def _save(run: Run, result: Body) -> None:
    if run.json is not None:
        run.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _rows(file: Path, *names: str) -> list[tuple[str, ...]]:
    """Rows of a .jsonl as tuples of the named fields. ValueError names line and field."""
    found: list[tuple[str, ...]] = []
    for number, line in lines_of(file):
        try:
            row = json.loads(line)
            found.append(tuple(str(row[name]) for name in names))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{number}: needs {', '.join(names)} ({error})") from None
    return found


def _texts(file: Path) -> list[str]:
    if file.suffix == ".jsonl":
        return [row[0] for row in _rows(file, "text")]
    return [file.read_text(encoding="utf-8")]


def _windows(ids: list[int], window: int) -> list[Json]:
    parts = [ids[i : i + window] for i in range(0, len(ids), window)]
    return [list(part) for part in parts if len(part) > 1]


async def _logprob_sum(http: httpx.AsyncClient, name: str, prompt: Json) -> tuple[float, int]:
    """(sum of logprobs, tokens) of a prompt, without its first token and what is generated."""
    body: Body = {
        "model": name, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1,
        "temperature": 0,
    }  # fmt: skip
    reply = await post(http, "/v1/completions", body)
    logprobs, usage = first_choice(reply).get("logprobs"), reply.get("usage")
    if not isinstance(logprobs, dict) or not isinstance(usage, dict):
        raise RuntimeError("the server sends no logprobs of the prompt")
    values, count = logprobs.get("token_logprobs"), usage.get("prompt_tokens")
    if not isinstance(values, list) or not isinstance(count, int):
        raise RuntimeError("the server sends no logprobs of the prompt")
    known = [float(v) for v in values[1:count] if isinstance(v, int | float)]
    return sum(known), len(known)
