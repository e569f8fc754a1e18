"""What the two generating endpoints accept: JSON in, one frozen `Ask` out.

Owns names, defaults and which values are refused; ranges shared with the brain come from
`core.request`, whose check runs on every request as well. Knows nothing of transport or tokens'
text.
"""

from dataclasses import dataclass, field, replace

from anabranch.core.request import (
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS_LIMIT,
    FieldError,
    SamplingParams,
)
from anabranch.server.errors import bad_field, from_field_error
from anabranch.server.fields import HARMLESS, Fields, check_integer, check_text, shown
from anabranch.text.tokenizer import Json

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOP_IDS = 128  # of the user; the model's own are added
MAX_MESSAGES = 4096
MAX_IDS = 1 << 20
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PLAIN_COMPLETION = 16  # OpenAI's default max_tokens of /v1/completions

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """One HTTP request, checked.

    prompts: of a completion; messages: of a chat (exactly one of the two is not empty).
    drop_output: max_tokens was 0: one token is generated and not shown (scoring with echo).
    prompt_logprobs: the user asked for them as a field (echo alone shows them in `logprobs`).
    """

    model: str | None
    n: int
    stream: bool
    include_usage: bool
    sampling: SamplingParams
    return_token_ids: bool
    timeout: float | None
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    drop_output: bool = False
    prompt_logprobs: bool = False
    messages: tuple[dict[str, Json], ...] = ()
    template_variables: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class _Common:
    """Fields that mean the same at every endpoint."""

    model: str | None
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    timeout: float | None


def parse_completion(body: dict[str, Json]) -> Ask:
    """Body of POST /v1/completions. ApiError 400 names the first field not servable."""
    fields = Fields(body)
    common = _common(fields)
    prompts = _prompts(fields.take("prompt"))
    echo = fields.boolean("echo")
    max_tokens = fields.integer("max_tokens", 0, MAX_TOKENS_LIMIT)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    fields.only("best_of", (common.n,), "candidates are not ranked; ask for n choices instead")
    fields.only("suffix", ("",), "text is only continued, never inserted")
    sampling = _sampling(fields, _PLAIN_COMPLETION if max_tokens is None else max_tokens, logprobs)
    _refuse_unserved(fields)
    fields.finish(HARMLESS)
    asked = sampling.prompt_logprobs
    if echo and logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(logprobs, asked or 0))
    return Ask(
        **vars(common),
        sampling=sampling,
        prompts=prompts,
        echo=echo,
        drop_output=max_tokens == 0,
        prompt_logprobs=asked is not None,
    )


def parse_chat(body: dict[str, Json]) -> Ask:
    """Body of POST /v1/chat/completions. ApiError 400 names the first field not servable."""
    fields = Fields(body)
    common = _common(fields)
    messages = _messages(fields.take("messages"))
    max_tokens = fields.integer("max_completion_tokens", 0, MAX_TOKENS_LIMIT)
    older = fields.integer("max_tokens", 0, MAX_TOKENS_LIMIT)
    max_tokens = older if max_tokens is None else max_tokens
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    sampling = _sampling(fields, max_tokens, (top or 0) if wanted else None)
    variables = fields.object("chat_template_kwargs") or {}
    _refuse_unserved(fields)
    _refuse_unserved_chat(fields)
    fields.finish(HARMLESS)
    return Ask(
        **vars(common),
        sampling=sampling,
        messages=messages,
        template_variables=variables,
        drop_output=max_tokens == 0,
        prompt_logprobs=sampling.prompt_logprobs is not None,
    )


def _common(fields: Fields) -> _Common:
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise bad_field("stream_options", "needs stream to be true")
        inner = Fields(options, "stream_options.")
        include_usage = inner.boolean("include_usage")
        inner.boolean("include_obfuscation")
        inner.finish()
    return _Common(
        model=fields.text("model", 1024),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.boolean("return_token_ids"),
        timeout=fields.number("timeout", 0.0, 1e9),
    )


def _sampling(fields: Fields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    temperature = fields.number("temperature", 0.0, 100.0)
    top_p = fields.number("top_p", 0.0, 1.0)
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    sampling = SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_k=max(top_k or 0, 0),
        top_p=1.0 if top_p is None else top_p,
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        max_tokens=1 if max_tokens == 0 else max_tokens,
        min_tokens=fields.integer("min_tokens", 0, MAX_TOKENS_LIMIT) or 0,
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP_LENGTH),
        stop_ids=fields.integers("stop_token_ids", MAX_STOP_IDS, 0, 2**31 - 1),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
    )
    try:
        return sampling.check()
    except FieldError as error:
        raise from_field_error(error) from None


def _refuse_unserved(fields: Fields) -> None:
    """Fields of public APIs that would change the answer: only neutral values pass."""
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, (0, 0.0), "penalties are not served; leave it at 0")
    fields.only("repetition_penalty", (1, 1.0), "penalties are not served; leave it at 1")
    fields.only("logit_bias", ({},), "biases are not served")


def _refuse_unserved_chat(fields: Fields) -> None:
    fields.only("response_format", ({"type": "text"},), "only text is served")
    fields.only("tools", ([],), "tools are not served")
    fields.only("functions", ([],), "tools are not served")
    for name in ("tool_choice", "function_call"):
        fields.only(name, ("none", "auto"), "tools are not served")
    fields.only("modalities", (["text"],), "only text is served")
    fields.only("audio", (), "only text is served")
    fields.only("prediction", (), "predicted outputs are not served")
    fields.only("web_search_options", (), "nothing is fetched from the web")


def _prompts(value: Json) -> tuple[Prompt, ...]:
    """A string, a list of ids, or a list of either. One prompt each."""
    if value is None:
        raise bad_field("prompt", "is missing", "missing_required_parameter")
    if isinstance(value, str):
        return (check_text("prompt", value),)
    if not isinstance(value, list):
        message = f"must be a string, token ids or a list of these, got {shown(value)}"
        raise bad_field("prompt", message, "invalid_type")
    if not value:
        raise bad_field("prompt", "is empty")
    if not isinstance(value[0], str | list):
        return (_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise bad_field("prompt", f"at most {MAX_PROMPTS} prompts, got {len(value)}")
    return tuple(_ids(p) if isinstance(p, list) else check_text("prompt", p) for p in value)


def _ids(value: list[Json]) -> tuple[int, ...]:
    if len(value) > MAX_IDS:
        raise bad_field("prompt", f"at most {MAX_IDS} token ids, got {len(value)}")
    return tuple(check_integer("prompt", item, 0, 2**31 - 1) for item in value)


def _messages(value: Json) -> tuple[dict[str, Json], ...]:
    if value is None:
        raise bad_field("messages", "is missing", "missing_required_parameter")
    if value == []:
        raise bad_field("messages", "is empty; give at least one message")
    if not isinstance(value, list):
        raise bad_field(
            "messages", f"must be a list of messages, got {shown(value)}", "invalid_type"
        )
    if len(value) > MAX_MESSAGES:
        raise bad_field("messages", f"at most {MAX_MESSAGES} messages, got {len(value)}")
    return tuple(_message(f"messages[{i}]", item) for i, item in enumerate(value))


def _message(name: str, value: Json) -> dict[str, Json]:
    """The message as templates want it: content is one string; the rest passes through."""
    if not isinstance(value, dict):
        raise bad_field(name, f"must be an object, got {shown(value)}", "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")
    content = value.get("content")
    if content is None:
        if role != "assistant":
            raise bad_field(f"{name}.content", "is missing", "missing_required_parameter")
        return value
    if isinstance(content, list):
        return {**value, "content": "".join(_part(f"{name}.content", p) for p in content)}
    return {**value, "content": check_text(f"{name}.content", content)}


def _part(name: str, value: Json) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "refusal"):
        message = f"only text parts are served, got {shown(kind if kind else value)}"
        raise bad_field(name, message, "unsupported_value")
    return check_text(name, value.get(str(kind)))
