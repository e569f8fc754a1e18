"""Every field, every strange value: refused by name or answered, and the server lives."""

import json
import math

import httpx
import pytest
from server_process import ServerProcess

from anabranch.server.errors import ApiError
from anabranch.server.fields import parse_body
from anabranch.server.schema import parse_chat, parse_completion

VALUES = ["null", "NaN", "Infinity", "-Infinity", "-1", "0", "1e39", "1e999", "2147483648",
          "9223372036854775808", "1" * 400, '"x"', "[]", "true", "{}", "0.5", "-0.0", "[[]]",
          '"\\ud800"', "1" + "0" * 5000]  # fmt: skip
COMMON = ["model", "n", "stream", "stream_options", "max_tokens", "min_tokens", "temperature",
          "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs",
          "return_token_ids", "prompt_logprobs", "timeout", "frequency_penalty",
          "presence_penalty", "repetition_penalty", "logit_bias", "user"]  # fmt: skip
ENDPOINTS = {
    "/v1/completions": ('"prompt": "hello"', [*COMMON, "prompt", "echo", "best_of", "suffix"]),
    "/v1/chat/completions": (
        '"messages": [{"role": "user", "content": "hi"}]',
        [*COMMON, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
         "response_format", "chat_template_kwargs", "modalities", "functions", "audio"],
    ),
}  # fmt: skip
CASES = [(path, name) for path, (_, names) in ENDPOINTS.items() for name in names]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_strange_values(server: ServerProcess, path: str, name: str) -> None:
    good = ENDPOINTS[path][0]
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for value in VALUES:
            # a later key wins, so this also replaces prompt and messages
            body = "{" + f'{good}, "{name}": {value}' + "}"
            reply = http.post(path, content=body.encode())
            assert reply.status_code in (200, 400, 404), f"{name}={value[:20]}: {reply.text}"
            if reply.status_code != 200:
                error = reply.json()["error"]
                huge = len(value) > 4000  # not even a JSON parser takes it
                assert huge or name in error["message"], f"{name}={value[:20]}: {error}"
                assert huge or error["param"].startswith(name)
        assert http.post(path, content=("{" + good + "}").encode()).status_code == 200


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "3", "null", '"x"', "{]", "nope", '{"prompt": "x"', "\ufeff{}", "[" * 100_000,
     '{"a":' * 50_000, '{"prompt": [NaN]}'],
)  # fmt: skip
def test_bodies_that_are_no_request(server: ServerProcess, body: str) -> None:
    for path in ENDPOINTS:
        reply = httpx.post(server.url + path, content=body.encode(), timeout=20)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(server.url + "/health").status_code == 200


def test_bytes_that_are_no_utf8(server: ServerProcess) -> None:
    reply = httpx.post(server.url + "/v1/completions", content=b'{"prompt": "\xff\xfe"}')
    assert reply.status_code == 400 and "utf-8" in reply.text


def test_nan_is_refused_by_the_name_of_its_field() -> None:
    for text in ('{"user": {"a": [1, NaN]}}', '{"b": 1, "user": -Infinity}'):
        with pytest.raises(ApiError, match="") as caught:
            parse_body(text.encode())
        assert caught.value.param == "user"
    assert parse_body(b'{"user": NaN, "user": "ok"}') == {"user": "ok"}


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_neutral_values_equal_absence(parse) -> None:
    base = {"prompt": "x"} if parse is parse_completion else {
        "messages": [{"role": "user", "content": "x"}]}  # fmt: skip
    names = [n for p, (_, ns) in ENDPOINTS.items() for n in ns
             if (p == "/v1/completions") == (parse is parse_completion)]  # fmt: skip
    plain = parse(base)
    assert parse(base | {n: None for n in names if n not in base}) == plain
    assert plain.sampling.temperature == 1.0 and plain.n == 1 and not plain.stream


def test_numbers_keep_their_meaning() -> None:
    ask = parse_completion(
        {"prompt": [1, 2], "temperature": 0, "top_k": -1, "top_p": 1, "seed": -(2**63), "n": 2,
         "max_tokens": 7, "logprobs": 0, "stop": "a", "stop_token_ids": [3], "timeout": 1}
    )  # fmt: skip
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 1.0)
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (-(2**63), 7, 0)
    assert (sampling.stop, sampling.stop_ids, ask.timeout) == (("a",), (3,), 1.0)
    assert ask.prompts == ((1, 2),)


@pytest.mark.parametrize(
    "prompt",
    [True, {}, [], [True], [1.5], [1, "a"], ["a", 1], ["a", [1, "b"]], [[1, -1]], ["a"] * 2000],
)  # fmt: skip
def test_prompts_of_a_wrong_kind(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(json.loads(json.dumps({"prompt": prompt})))
    assert caught.value.param == "prompt" and caught.value.status == 400


def test_limits_hold_inclusive() -> None:
    base = {"prompt": "x"}
    for name, low, high in (("temperature", 0, 100), ("min_p", 0, 1), ("logprobs", 0, 20),
                            ("n", 1, 128), ("top_k", -1, 2**31 - 1)):  # fmt: skip
        for value in (low, high):
            parse_completion(base | {name: value})
        for value in (low - 1, high + 1):
            with pytest.raises(ApiError) as caught:
                parse_completion(base | {name: value})
            assert caught.value.param == name
    with pytest.raises(ApiError):
        parse_completion(base | {"temperature": math.nan})
