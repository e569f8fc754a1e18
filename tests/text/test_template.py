"""Chat templates: as transformers renders them, and held when they misbehave."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_text import CHAT, save_tiny

from anabranch.text.template import ChatTemplate, TemplateError
from anabranch.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <b>&'\" naïve 🦙"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "what?"},
]
TOOLS = [{"type": "function", "function": {"name": "f<>", "parameters": {"b": 1, "a": [True]}}}]
# in the manner of published templates: whitespace control, namespaces, filters, loop controls
TEMPLATES = [
    CHAT,
    "{{ bos_token }}{% for m in messages %}\n    {%- if m['role'] == 'user' %}\n"
    "        {{- '[INST] ' + m['content'] | trim + ' [/INST]' }}\n    {%- else %}\n"
    "        {{- m.content ~ eos_token }}\n    {%- endif %}\n{%- endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{{ loop.index0 }}:{{ m | tojson }}\n"
    "{% endfor %}{{ ns.n }}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% for t in tools %}{{ t.function | tojson }}"
    "{% endfor %}{% endif %}",
    "{% macro show(m) %}<{{ m.role | upper }}>{{ m.content }}{% endmacro %}"
    "{% for m in messages[1:] %}{{ show(m) }}{% endfor %}{{ messages | length }}"
    "{{ messages[-1].content.split('h') | join('|') }}",
    "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n  {% endfor %}",
    "{% if enable_thinking is defined and not enable_thinking %}no{% else %}yes{% endif %}"
    "{{ nothing }}{{ 'x' if missing else 'y' }}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


Make = Callable[..., ChatTemplate]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ChatTemplate] = []

    def build(source: str, **special: str) -> ChatTemplate:
        made.append(ChatTemplate(source, special))
        return made[-1]

    yield build
    for template in made:
        template.close()


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(folder: Path, source: str, prompt: bool) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        MESSAGES, tools=TOOLS, chat_template=source, tokenize=False,
        add_generation_prompt=prompt, enable_thinking=False,
    )  # fmt: skip
    template = ChatTemplate(source, Tokenizer.load(folder).special_tokens)
    found = template.render(
        MESSAGES, tools=TOOLS, add_generation_prompt=prompt, variables={"enable_thinking": False}
    )
    template.close()
    assert found == expected


LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(70) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ 'x' | center(10 ** 12) }}",
    "{{ range(10 ** 9) | list }}",
    "{% for i in range(90000) %}{{ 'a' * 9000 }}{% endfor %}",
    "{{ 'a' * (10 ** 9) }}",  # folded while the template compiles
    "{{ '%1000000000d' % 1 }}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_without_end_is_an_error_in_bounded_time(make: Make, source: str) -> None:
    template = make(source)
    begin = time.monotonic()
    with pytest.raises(TemplateError):
        template.render(MESSAGES)
    assert time.monotonic() - begin < 15


def test_the_next_rendering_has_a_fresh_process(make: Make) -> None:
    source = "{% if messages[0].content == 'x' %}" + LOOPS[0] + "{% endif %}ok"
    template = make(source)
    with pytest.raises(TemplateError, match="limits"):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([{"role": "user", "content": "y"}]) == "ok"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ (lambda: 1)() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self.__init__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ raise_exception('the roles are wrong') }}",
    "{% bogus %}",
    "{{ messages[0].nothing.at.all }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_reaching_out_is_an_error_or_nothing(make: Make, source: str) -> None:
    try:
        text = make(source).render(MESSAGES)
    except TemplateError:
        return
    assert text.strip() == ""  # jinja shows an undefined value as nothing


def test_the_message_of_raise_exception_is_told(make: Make) -> None:
    with pytest.raises(TemplateError, match="the roles are wrong"):
        make(ESCAPES[10]).render(MESSAGES)


def test_an_error_leaves_the_next_rendering_alone(make: Make) -> None:
    template = make("{% if messages[0].content == 'x' %}{{ raise_exception('no') }}{% endif %}ok")
    with pytest.raises(TemplateError, match="no"):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([{"role": "user", "content": "y"}]) == "ok"


def test_reserved_names_cannot_be_set(make: Make) -> None:
    template = make("{{ eos_token }}", eos_token="</s>")
    for name in ("messages", "eos_token", "add_generation_prompt"):
        with pytest.raises(TemplateError, match=name):
            template.render(MESSAGES, variables={name: "x"})


def test_threads_share_one_template(make: Make) -> None:
    template = make("{{ messages[0].content }}")
    found: dict[int, str] = {}

    def work(i: int) -> None:
        found[i] = template.render([{"role": "user", "content": str(i) * 1000}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {i: str(i) * 1000 for i in range(10)}


def test_a_long_conversation_passes_through(make: Make) -> None:
    template = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "é🦙" * 5000} for _ in range(200)]
    assert len(template.render(messages)) == 2_000_000


def test_closing_ends_the_process(make: Make) -> None:
    template = make("x")
    template.render(MESSAGES)
    process = template._child._process
    template.close()
    assert process.poll() is not None
