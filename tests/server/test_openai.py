"""Conformance, seen by the official `openai` client over a real socket."""

import json
import math
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from fake_engine import REPLY
from server_process import ServerProcess

from anabranch.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.load(tiny_folder)


def rotated(tokenizer: Tokenizer, begin: int) -> str:
    ids = tokenizer.encode(REPLY, False)
    begin %= len(ids)
    return tokenizer.decode(ids[begin:] + ids[:begin])


def test_chat(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    reply = api.chat.completions.create(model="tiny", messages=HI)
    (choice,) = reply.choices
    assert choice.message.content == REPLY
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert reply.object == "chat.completion" and reply.model == "tiny"
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert reply.usage.prompt_tokens == len(tokenizer.encode(prompt, False))
    assert reply.usage.completion_tokens == len(tokenizer.encode(REPLY, False)) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert choice.logprobs is None


def test_chat_stream_equals_the_whole(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    chunks = list(
        api.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True},
            logprobs=True, top_logprobs=2,
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == REPLY
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("stop") == 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    # the second asking of the same prompt hits the prefix cache
    assert chunks[-1].usage.model_copy(update={"prompt_tokens_details": None}) == (
        whole.usage.model_copy(update={"prompt_tokens_details": None})
    )
    entries = [e for c in chunks[:-1] if c.choices[0].logprobs for e in
               c.choices[0].logprobs.content]  # fmt: skip
    assert entries == whole.choices[0].logprobs.content
    assert len({c.id for c in chunks}) == 1
    assert not any("�" in (c.choices[0].delta.content or "") for c in chunks[:-1])


def test_no_usage_chunk_unless_asked(api: openai.OpenAI) -> None:
    chunks = list(api.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_chat_logprobs(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in content).decode() == REPLY
    assert all(len(e.top_logprobs) == 3 for e in content)
    assert all(e.top_logprobs[0].token == e.token for e in content)
    assert content[0].token == "the" and content[0].logprob == pytest.approx(math.log(0.5))
    assert api.chat.completions.create(
        model="tiny", messages=HI, logprobs=True
    ).choices[0].logprobs.content[0].top_logprobs == []  # fmt: skip


def test_choices_have_consecutive_seeds(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    reply = api.chat.completions.create(model="tiny", messages=HI, n=3, seed=4)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    texts = [rotated(tokenizer, 4 + i) for i in range(3)]
    assert [c.message.content for c in reply.choices] == texts
    streamed = {0: "", 1: "", 2: ""}
    ends = set()
    for chunk in api.chat.completions.create(model="tiny", messages=HI, n=3, seed=4, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.add(choice.index)
    assert list(streamed.values()) == texts and ends == {0, 1, 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["x jum", "dog END", ["never", "azy d"], "🎉", "the"])
def test_stop_strings_never_leak(
    api: openai.OpenAI, tokenizer: Tokenizer, stop: str | list[str], stream: bool
) -> None:
    expected = min((REPLY.split(s)[0] for s in ([stop] if isinstance(stop, str) else stop)),
                   key=len)  # fmt: skip
    found = api.completions.create(
        model="tiny", prompt="x", stop=stop, stream=stream, max_tokens=400, logprobs=1
    )
    parts = list(found) if stream else [found]
    choices = [c for p in parts for c in p.choices]
    text = ""
    for choice in choices:
        text += choice.text
        assert expected.startswith(text)
    assert text == expected
    assert choices[-1].finish_reason == "stop"
    tokens = [t for c in choices for t in c.logprobs.tokens]
    offsets = [o for c in choices for o in c.logprobs.text_offset]
    assert all(o < len(expected) for o in offsets) and len(tokens) == len(offsets)


def test_completion_and_its_logprobs(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    reply = api.completions.create(model="tiny", prompt="hello", max_tokens=9, logprobs=2)
    (choice,) = reply.choices
    ids = tokenizer.encode(REPLY, False)[:9]
    assert choice.text == tokenizer.decode(ids)
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == [tokenizer.token_text(i) for i in ids]
    assert choice.logprobs.token_logprobs == pytest.approx([math.log(0.5)] * 9)
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    assert reply.usage.completion_tokens == 9


def test_default_length_of_a_completion_is_openais(api: openai.OpenAI) -> None:
    assert api.completions.create(model="tiny", prompt="x").usage.completion_tokens == 16


def test_echo_with_logprobs(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "the naïve dog"
    reply = api.completions.create(model="tiny", prompt=prompt, max_tokens=3, logprobs=1, echo=True)
    logprobs, text = reply.choices[0].logprobs, reply.choices[0].text
    assert text == prompt + "the quick brown"
    assert "".join(logprobs.tokens) == text
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset:].startswith(token)


def test_scoring_a_prompt_without_output(api: openai.OpenAI) -> None:
    reply = api.completions.create(
        model="tiny", prompt="the lazy dog", max_tokens=0, logprobs=1, echo=True
    )
    assert reply.choices[0].text == "the lazy dog"
    assert "".join(reply.choices[0].logprobs.tokens) == "the lazy dog"
    assert reply.usage.completion_tokens == 0


def test_echo_streams_the_prompt_first(api: openai.OpenAI) -> None:
    chunks = list(
        api.completions.create(
            model="tiny", prompt="hello", max_tokens=2, echo=True, stream=True, logprobs=0
        )
    )
    assert chunks[0].choices[0].text.startswith("hello")
    assert "".join(c.choices[0].text for c in chunks) == "hellothe quick"
    tokens = [t for c in chunks for t in c.choices[0].logprobs.tokens]
    assert "".join(tokens) == "hellothe quick"


def test_every_form_of_prompt(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    for prompt, count in (
        ("hello", 1), (ids, 1), (["hello", "a b"], 2), ([ids, [5, 6, 7]], 2), ([ids], 1)
    ):  # fmt: skip
        reply = api.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=2)
        assert [c.index for c in reply.choices] == list(range(2 * count))
        assert reply.usage.completion_tokens == 4 * count
    one = api.completions.create(model="tiny", prompt=ids, max_tokens=2)
    assert one.usage.prompt_tokens == len(ids)
    echoed = api.completions.create(model="tiny", prompt=[ids, [5]], max_tokens=1, echo=True)
    assert echoed.choices[0].text == "hellothe"


def test_cached_tokens(api: openai.OpenAI) -> None:
    prompt = "a prompt that nobody else sends"
    first, second = (api.completions.create(model="tiny", prompt=prompt) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_extras(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(REPLY, False)
    reply = api.completions.create(
        model="tiny", prompt="hello", max_tokens=200, logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True, "prompt_logprobs": 2,
                    "top_k": 5, "min_p": 0.1},
    )  # fmt: skip
    (choice,) = reply.choices
    assert choice.token_ids == [ids[i % len(ids)] for i in range(200)]
    assert choice.prompt_token_ids == tokenizer.encode("hello")
    assert len(choice.logprobs.tokens) == 200 and choice.finish_reason == "length"
    assert choice.prompt_logprobs[0] is None
    assert [len(p) for p in choice.prompt_logprobs[1:]] == [2] * (len(choice.prompt_token_ids) - 1)
    chat = api.chat.completions.create(
        model="tiny", messages=HI, extra_body={"return_token_ids": True, "min_tokens": 3}
    )
    assert chat.choices[0].token_ids == [*ids, tokenizer.eos_ids[0]]
    assert tokenizer.decode(chat.prompt_token_ids, skip_special=False).endswith("assistant\n")


def test_end_ids_past_the_vocabulary_are_not_the_users_fault(tiny_folder: Path) -> None:
    folder = shutil.copytree(tiny_folder, tiny_folder.parent / "padded", dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 10**6]}))
    server = ServerProcess(folder).wait_ready()
    try:
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 50}
        reply = httpx.post(server.url + "/v1/completions", json=ask, timeout=20)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        refused = httpx.post(
            server.url + "/v1/completions", json=ask | {"stop_token_ids": [10**6]}, timeout=20
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop_token_ids"
    finally:
        server.end()


def test_stop_token_ids_and_min_tokens(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(REPLY, False)
    reply = api.completions.create(
        model="tiny", prompt="x", max_tokens=50, extra_body={"stop_token_ids": [ids[3]]}
    )
    assert reply.choices[0].text == tokenizer.decode(ids[:3])
    assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens == 4
    text = api.completions.create(
        model="tiny", prompt="x", max_tokens=50, stop=" quick", extra_body={"min_tokens": 4}
    ).choices[0].text  # fmt: skip
    assert text.startswith("the quick brown fox")


def test_models(api: openai.OpenAI) -> None:
    assert [m.id for m in api.models.list()] == ["tiny", "alias"]
    assert api.models.retrieve("alias").id == "alias"
    assert api.chat.completions.create(model="alias", messages=HI).model == "alias"
    with pytest.raises(openai.NotFoundError, match="nope"):
        api.models.retrieve("nope")


def test_content_parts_are_joined(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    one = api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    two = api.chat.completions.create(model="tiny", messages=HI)
    assert one.usage.prompt_tokens == two.usage.prompt_tokens


def test_harmless_fields_are_taken(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(
        model="tiny", messages=HI, user="me", metadata={"a": "b"}, store=False, frequency_penalty=0,
        presence_penalty=0.0, logit_bias={}, response_format={"type": "text"}, tools=[],
        tool_choice="none", parallel_tool_calls=True, service_tier="auto", max_completion_tokens=3,
    )  # fmt: skip
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 5, "extra_body": {"min_tokens": 6}}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"extra_body": {"bogus_field": 1}}, "bogus_field"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url":
            {"url": "http://127.0.0.1/"}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, "messages"),
    ],
)  # fmt: skip
def test_errors_name_their_field(api: openai.OpenAI, fields: dict, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**{"model": "tiny", "messages": HI, **fields})
    error = caught.value
    assert error.param == name and error.type == "invalid_request_error" and error.code
    assert error.body["message"].startswith(name)


def test_best_of_and_suffix_are_refused(api: openai.OpenAI) -> None:
    for field, value in (("best_of", 3), ("suffix", "end")):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="tiny", prompt="x", **{field: value})
        assert caught.value.param == field


def test_too_long_a_prompt_says_so(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="tiny", prompt="x " * 3000)
    assert caught.value.code == "context_length_exceeded" and "512" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        api.completions.create(model="tiny", prompt=[10**6])
    with pytest.raises(openai.BadRequestError, match="prompt"):
        api.completions.create(model="tiny", prompt=[[]])


def test_more_tokens_than_fit_end_with_length(api: openai.OpenAI) -> None:
    reply = api.completions.create(
        model="tiny", prompt="x", max_tokens=100_000, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == 512


def test_unknown_models_and_errors_of_the_engine(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        api.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError, match="cursed"):
        api.completions.create(model="tiny", prompt="^")
    with pytest.raises(openai.APIError, match="cursed"):
        list(api.completions.create(model="tiny", prompt="^", stream=True))
