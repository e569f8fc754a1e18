"""Child process that renders chat templates: sandboxed Jinja under hard limits of time and memory.

A template comes from a checkpoint, so it is foreign code. Jinja's sandbox keeps it from reaching
out (no attributes that begin with an underscore, nothing mutable, no imports); this process keeps
it from running on: a CPU timer and an address-space limit end it, whatever the template does, and
the parent only sees a closed socket. Run by `anabranch.text.template` as a script; imports nothing
of the package, so that it starts fast. Protocol: JSON lines on stdin and stdout; first the
template, then one line of variables per rendering; every answer is {"text": ...} or {"error": ...}.
The environment is the one that published templates are written for (transformers' documentation,
"Chat templates"): trimmed blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and a `generation` block that only passes its content on.
"""

import json
import resource
import signal
import sys
from datetime import datetime

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
MAX_OUTPUT = 16 << 20


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks words to train on: no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def answer(template: Template, line: str) -> dict[str, str]:
    """One rendering. Whatever a template raises is its error, not ours."""
    try:
        text = template.render(**json.loads(line))
    except MemoryError:
        return {"error": f"needs more than {MEMORY_BYTES >> 20} MiB"}
    except RecursionError:
        return {"error": "calls itself without end"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    if len(text) > MAX_OUTPUT:
        return {"error": f"renders {len(text)} characters; at most {MAX_OUTPUT} are allowed"}
    return {"text": text}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = True
    template: Template | None = None
    for line in sys.stdin:
        # SIGPROF's default action ends the process: nothing a template runs can catch it
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        if first:
            first = False
            try:
                template, reply = compile_template(json.loads(line)), {"text": ""}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        else:
            assert template is not None, "rendering before a template"
            reply = answer(template, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
