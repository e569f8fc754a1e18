"""Answers in OpenAI's form: the bodies and stream chunks of both endpoints.

Owns every key that a client sees in a good answer. Pure: deltas in, JSON values out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from anabranch.core.plan import TokenLogprobs
from anabranch.server.generate import Choice, Delta, Entry
from anabranch.server.schema import Ask
from anabranch.text.stream import TextStream
from anabranch.text.tokenizer import Json, Tokenizer

_LOWEST = -9999.0  # how OpenAI writes a logprob of minus infinity, which JSON cannot
Body = dict[str, Json]


@dataclass(frozen=True)
class PromptText:
    """One prompt as the model sees it; `text` is what echo shows."""

    text: str
    ids: tuple[int, ...]


def joined(deltas: Sequence[Delta]) -> Delta:
    """All of a choice's deltas as one."""
    return Delta(
        "".join(d.text for d in deltas),
        tuple(token for d in deltas for token in d.tokens),
        tuple(entry for d in deltas for entry in d.entries),
        next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        deltas[-1].finish_reason if deltas else None,
    )


def usage(prompts: Sequence[PromptText], choices: Sequence[Choice]) -> Body:
    """Token counts: a prompt counts once, whatever n is."""
    prompt_tokens = sum(len(p.ids) for p in prompts)
    cached = {c.prompt: c.cached for c in reversed(choices)}
    completion = sum(c.generated for c in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


class Shape(Protocol):
    """How an endpoint writes its answer."""

    def opening(self, choice: Choice) -> list[Body]:
        """Chunks before the first token."""
        ...

    def chunks(self, choice: Choice, delta: Delta, first: bool) -> list[Body]:
        """Chunks of a delta; `first` is the choice's first one."""
        ...

    def whole(self, parts: Sequence[tuple[Choice, Delta]], usage: Body) -> Body:
        """The answer without streaming; parts in index order."""
        ...

    def usage_chunk(self, usage: Body) -> Body: ...


class _Base:
    def __init__(
        self, id: str, model: str, ask: Ask, prompts: Sequence[PromptText], tokenizer: Tokenizer
    ) -> None:
        self._ask = ask
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._head: Body = {"id": id, "object": "", "created": int(time.time()), "model": model}

    def _chunk(self, kind: str, choices: list[Json], usage: Body | None = None) -> Body:
        body: Body = {**self._head, "object": kind, "choices": choices}
        if self._ask.include_usage:
            body["usage"] = usage
        return body

    def _prompt_logprobs(self, choice: Choice, delta: Delta) -> Json:
        """One entry a position, the first null: {token id: {logprob, rank, decoded_token}}."""
        found: list[Json] = [None]
        for entry in delta.prompt_logprobs or ():
            ranked = [(t, lp, r + 1) for r, (t, lp) in enumerate(entry.top)]
            if all(t != entry.token for t, _ in entry.top):
                ranked.append((entry.token, entry.logprob, entry.rank))
            found.append(
                {
                    str(t): {
                        "logprob": _finite(lp),
                        "rank": rank,
                        "decoded_token": self._tokenizer.token_text(t),
                    }
                    for t, lp, rank in ranked
                }
            )
        return found


class CompletionShape(_Base):
    """/v1/completions."""

    def opening(self, choice: Choice) -> list[Body]:
        return []

    def chunks(self, choice: Choice, delta: Delta, first: bool) -> list[Body]:
        if not first and not (delta.text or delta.tokens or delta.finish_reason or delta.entries):
            return []
        return [self._chunk("text_completion", [self._choice(choice, delta, first)])]

    def whole(self, parts: Sequence[tuple[Choice, Delta]], usage: Body) -> Body:
        choices: list[Json] = [self._choice(choice, delta, True) for choice, delta in parts]
        return {**self._head, "object": "text_completion", "choices": choices, "usage": usage}

    def usage_chunk(self, usage: Body) -> Body:
        return self._chunk("text_completion", [], usage)

    def _choice(self, choice: Choice, delta: Delta, first: bool) -> Body:
        prompt = self._prompts[choice.prompt]
        text, before = delta.text, 0
        if self._ask.echo:
            before = len(prompt.text)
            text = prompt.text + text if first else text
        logprobs: Body | None = None
        if self._ask.sampling.logprobs is not None:
            logprobs = self._logprobs(prompt, delta, before, self._ask.echo and first)
        body: Body = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if self._ask.return_token_ids:
            body["token_ids"] = list(delta.tokens)
            if first:
                body["prompt_token_ids"] = list(prompt.ids)
        if self._ask.prompt_logprobs and first:
            body["prompt_logprobs"] = self._prompt_logprobs(choice, delta)
        return body

    def _logprobs(self, prompt: PromptText, delta: Delta, before: int, echo: bool) -> Body:
        most = self._ask.sampling.logprobs or 0
        tokens: list[Json] = []
        values: list[Json] = []
        tops: list[Json] = []
        offsets: list[Json] = []
        if echo:
            entries = self._prompt_entries(prompt, delta.prompt_logprobs or ())
            tokens.append(self._tokenizer.token_text(prompt.ids[0]))
            values.append(None)
            tops.append(None)
            offsets.append(0)
        else:
            entries = []
        entries += [replace(e, offset=e.offset + before) for e in delta.entries]
        for entry in entries:
            tokens.append(self._tokenizer.token_text(entry.logprobs.token))
            values.append(_finite(entry.logprobs.logprob))
            tops.append(self._top(entry.logprobs, most))
            offsets.append(entry.offset)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _prompt_entries(self, prompt: PromptText, logprobs: Sequence[TokenLogprobs]) -> list[Entry]:
        offsets: list[int] = []
        # a begin token that the tokenizer added is no part of the text
        bos = self._tokenizer.bos_id
        start = self._tokenizer.token_text(bos) if bos is not None else None
        hidden = prompt.ids[0] == bos and start is not None and not prompt.text.startswith(start)
        stream = TextStream(self._tokenizer, skip_special=False)
        for i, token in enumerate(prompt.ids):
            offsets.append(min(stream.length, len(prompt.text)))
            if not (i == 0 and hidden):
                stream.push(token)
        return [Entry(e, o) for e, o in zip(logprobs, offsets[1:], strict=False)]

    def _top(self, entry: TokenLogprobs, most: int) -> Body:
        found: Body = {}
        for token, logprob in entry.top[:most]:
            found.setdefault(self._tokenizer.token_text(token), _finite(logprob))
        found.setdefault(self._tokenizer.token_text(entry.token), _finite(entry.logprob))
        return found


class ChatShape(_Base):
    """/v1/chat/completions."""

    _KIND = "chat.completion.chunk"

    def opening(self, choice: Choice) -> list[Body]:
        body = self._delta(choice, {"role": "assistant", "content": ""})
        chunk = self._chunk(self._KIND, [body])
        if self._ask.return_token_ids:
            chunk["prompt_token_ids"] = list(self._prompts[0].ids)
        return [chunk]

    def chunks(self, choice: Choice, delta: Delta, first: bool) -> list[Body]:
        found: list[Body] = []
        if delta.text or delta.tokens or delta.entries:
            body = self._delta(choice, {"content": delta.text} if delta.text else {})
            body["logprobs"] = self._logprobs(delta)
            if self._ask.return_token_ids:
                body["token_ids"] = list(delta.tokens)
            if delta.text or delta.entries or self._ask.return_token_ids:
                found.append(self._chunk(self._KIND, [body]))
        if self._ask.prompt_logprobs and delta.prompt_logprobs is not None:
            chunk = self._chunk(self._KIND, [])
            chunk["prompt_logprobs"] = self._prompt_logprobs(choice, delta)
            found.append(chunk)
        if delta.finish_reason is not None:
            found.append(self._chunk(self._KIND, [self._delta(choice, {}, delta.finish_reason)]))
        return found

    def whole(self, parts: Sequence[tuple[Choice, Delta]], usage: Body) -> Body:
        choices: list[Json] = []
        for choice, delta in parts:
            body: Body = {
                "index": choice.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            if self._ask.return_token_ids:
                body["token_ids"] = list(delta.tokens)
            choices.append(body)
        answer: Body = {
            **self._head, "object": "chat.completion", "choices": choices, "usage": usage
        }  # fmt: skip
        if self._ask.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompts[0].ids)
        if self._ask.prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(*parts[0])
        return answer

    def usage_chunk(self, usage: Body) -> Body:
        return self._chunk(self._KIND, [], usage)

    def _delta(self, choice: Choice, delta: Body, finish: str | None = None) -> Body:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _logprobs(self, delta: Delta) -> Body | None:
        if self._ask.sampling.logprobs is None:
            return None
        content: list[Json] = []
        for entry in delta.entries:
            found = entry.logprobs
            tops = found.top[: self._ask.sampling.logprobs]
            content.append(
                {
                    **self._token(found.token, found.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in tops],
                }
            )
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Body:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _finite(logprob: float) -> float:
    """JSON has no infinities and no NaN."""
    return logprob if logprob > _LOWEST else _LOWEST
