"""The `anabranch` command: names, arguments and help; each command's work is in its own module.

Owns how errors reach the user (one line, or JSON under --json; never a traceback) and exit codes:
0 done, 1 failed, 2 refused, 130 interrupted.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import typer

from anabranch.cli.aliases import translate
from anabranch.cli.flags import flags
from anabranch.core.config import EngineConfig
from anabranch.server.options import ServeOptions

# rich help and typer's excepthook would cost more start-up time than all the rest
cli = typer.Typer(
    name="anabranch",
    help="LLM inference engine and OpenAI-compatible server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
evals = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
benches = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(evals, name="eval", help="Measure accuracy: arithmetic, gsm8k, perplexity.")
cli.add_typer(benches, name="bench", help="Measure speed.")

# click's own class, wherever this version of typer keeps click
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
Json = Annotated[bool, typer.Option("--json", help="print JSON, errors too")]
Url = Annotated[
    str | None, typer.Option(help="a running OpenAI-compatible server, instead of MODEL")
]
Key = Annotated[str | None, typer.Option(help="API key of that server")]
Out = Annotated[Path | None, typer.Option("--json", help="write the result to this file")]
Name = Annotated[str | None, typer.Option(help="model name at that server")]
Misses = Annotated[Path | None, typer.Option(help="write the misses to this file")]
Compare = Annotated[
    tuple[str, str] | None, typer.Option(help="two servers: do they answer alike?", metavar="A B")
]
Most = Annotated[int, typer.Option(help="requests at a time", min=1)]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]


@cli.command()
def demo(
    draw: Annotated[
        Path | None, typer.Option(help="write a picture of each layout to this folder")
    ] = None,
) -> int:
    """Run the packaged model in one process and in every kind of layout; compare the tokens."""
    from anabranch.cli.demo import run

    return run(draw)


@cli.command()
@flags(config=EngineConfig, options=ServeOptions)
def serve(config: EngineConfig, options: ServeOptions, json: Json = False) -> int:
    """Serve MODEL (the packaged demo model if none is named) over OpenAI's API."""
    from anabranch.engine.early import early_engine

    options.check()
    with early_engine(config.tp) as early:  # before the imports of the server, which take a second
        from anabranch.cli.front import run_server

        return run_server(config, options, json, early)


@cli.command()
@flags(config=EngineConfig)
def generate(
    config: EngineConfig,
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt (may be repeated)")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help=".jsonl (prompt: text or ids, messages or question) or one prompt a line"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate", min=1)] = 128,
    temperature: Temperature = 0.0,
    chat: Annotated[bool, typer.Option(help="prompts are user messages of a chat")] = False,
    concurrency: Most = 32,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> int:
    """Continue prompts, from the command line or a file."""
    from anabranch.cli.generate import Settings, run

    settings = Settings(prompt or [], file, max_tokens, temperature, chat, concurrency)
    return run(config, settings, url, key, json)


@cli.command()
@flags(config=EngineConfig)
def score(
    config: EngineConfig,
    ids: Annotated[Path, typer.Option(help="token ids: JSON list, .npy, or numbers in a text")],
    out: Annotated[Path, typer.Option(help=".npy file for the logits, float32 [T, V]")],
    decode_from: Annotated[
        int | None, typer.Option(help="ids run as prefill; the rest one by one (default: all)")
    ] = None,
    json: Json = False,
) -> int:
    """Logits of given token ids, by prefill and teacher-forced decode."""
    from anabranch.cli.score import run

    return run(config, ids, decode_from, out, json)


@cli.command()
@flags(config=EngineConfig)
def chat(
    config: EngineConfig,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens of an answer", min=1)] = 1024,
    temperature: Temperature = 0.7,
    url: Url = None,
    key: Key = None,
    name: Name = None,
) -> int:
    """Chat with MODEL in the terminal."""
    from anabranch.cli.chat import run

    return run(config, system, max_tokens, temperature, url, key, name)


@cli.command()
def pull(
    model: Annotated[str, typer.Argument(help="catalogue name or hub id")], json: Json = False
) -> int:
    """Fetch a model into the cache."""
    from anabranch.cli.env import pull as fetch

    return fetch(model, json)


@cli.command()
def env(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="measure the collectives here, for the choices made from their cost"
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Versions, machine, instruction sets, device, cache folder; or --calibrate."""
    from anabranch.cli.env import calibrate as measure
    from anabranch.cli.env import show

    return measure(json) if calibrate else show(json)


@cli.command()
@flags(config=EngineConfig)
def layout(
    config: EngineConfig,
    draw: Annotated[
        Path | None, typer.Option(help="write a picture: FILE.svg, or FILE.png with Pillow")
    ] = None,
    json: Json = False,
) -> int:
    """Show who holds which rows, heads, experts and KV stripes, and what a layer moves."""
    from anabranch.cli.layout import run

    return run(config, draw, json)


@evals.command()
@flags(config=EngineConfig)
def arithmetic(
    config: EngineConfig,
    n: Annotated[int, typer.Option(help="problems of each split", min=1)] = 200,
    problem_seed: Annotated[int, typer.Option(help="of the problems drawn")] = 0,
    concurrency: Most = 32,
    url: Url = None,
    key: Key = None,
    name: Name = None,
    compare: Compare = None,
    json: Out = None,
    misses: Misses = None,
) -> int:
    """Generated word problems: new numbers in trained templates, and held-out templates."""
    from anabranch.cli.evals import Run, arithmetic

    run = Run(config, url, key, name, concurrency, json, misses, compare)
    return arithmetic(run, n, problem_seed)


@evals.command()
@flags(config=EngineConfig)
def gsm8k(
    config: EngineConfig,
    data: Annotated[Path, typer.Option(help=".jsonl with question and answer")],
    shots: Annotated[int, typer.Option(help="worked examples before each question", min=0)] = 8,
    shots_data: Annotated[
        Path | None,
        typer.Option(help=".jsonl of the examples (default: the first lines of --data)"),
    ] = None,
    n: Annotated[int | None, typer.Option(help="questions (default: all)", min=1)] = None,
    concurrency: Most = 32,
    url: Url = None,
    key: Key = None,
    name: Name = None,
    compare: Compare = None,
    json: Out = None,
    misses: Misses = None,
) -> int:
    """GSM8K, scored strictly and flexibly as lm-evaluation-harness does."""
    from anabranch.cli.evals import Run, gsm8k

    run = Run(config, url, key, name, concurrency, json, misses, compare)
    return gsm8k(run, data, shots, shots_data, n)


@evals.command()
@flags(config=EngineConfig)
def perplexity(
    config: EngineConfig,
    data: Annotated[Path, typer.Option(help="text file, or .jsonl with text")],
    window: Annotated[int, typer.Option(help="tokens of a window", min=2)] = 1024,
    tokenizer: Annotated[
        Path | None, typer.Option(help="cuts windows for --url (default: a text is one window)")
    ] = None,
    concurrency: Most = 8,
    url: Url = None,
    key: Key = None,
    name: Name = None,
    json: Out = None,
) -> int:
    """Perplexity of texts, each cut into windows that do not overlap."""
    from anabranch.cli.evals import Run, perplexity

    return perplexity(Run(config, url, key, name, concurrency, json), data, window, tokenizer)


@benches.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="server to load")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="its model (default: the first it lists)")
    ] = None,
    n: Annotated[int, typer.Option(help="requests", min=1)] = 100,
    concurrency: Most = 32,
    rate: Annotated[
        float | None,
        typer.Option(help="arrivals a second (Poisson), instead of a fixed number at a time"),
    ] = None,
    input_len: Annotated[int, typer.Option(help="words of a prompt", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="tokens of an answer", min=1)] = 128,
    prefix_len: Annotated[int, typer.Option(help="words that all prompts share", min=0)] = 0,
    ignore_eos: Annotated[
        bool, typer.Option(help="always the full length (an extra field)")
    ] = True,
    key: Key = None,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Load any OpenAI-compatible server; report latencies and throughput."""
    from anabranch.cli.bench import Load, run

    load = Load(n, concurrency, rate, input_len, output_len, prefix_len, ignore_eos, seed)
    return run(url, key, model, load, json)


INTERRUPTED = 130
"""Exit status after ^C, as shells have it: 128 and the signal."""


def app() -> None:
    """The console script."""
    code = run(sys.argv[1:])
    if code == INTERRUPTED:  # what was under way is left as it is; engines end with this process
        print("anabranch: interrupted", file=sys.stderr)
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    as_json = "--json" in argv and argv[0] != "eval"  # whose --json is a file's name
    try:
        words = translate(argv)
        if words != argv:
            print("resolved: anabranch", " ".join(words), file=sys.stderr)
        command = typer.main.get_command(cli)
        return command.main(words, "anabranch", standalone_mode=False) or 0
    except typer.Exit as exit:
        return exit.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _UsageError as error:
        return _fail("usage", error.format_message() or type(error).__name__, 2, as_json)
    except ValueError as error:
        return _fail("invalid", str(error), 2, as_json)
    except Exception as error:
        # imported late: it brings numpy, which a help text need not wait for
        from anabranch.core.resolve import Refusal

        if isinstance(error, Refusal):
            return _fail(error.code, error.message, 2, as_json, error.numbers, error.nearest)
        if os.environ.get("ANABRANCH_TRACEBACK"):
            raise
        return _fail("failed", str(error) or type(error).__name__, 1, as_json)


def _fail(
    code: str,
    message: str,
    exit_code: int,
    as_json: bool,
    numbers: Mapping[str, int | str] | None = None,
    nearest: str | None = None,
) -> int:
    if as_json:
        error = {
            "code": code,
            "message": message,
            "numbers": dict(numbers or {}),
            "nearest": nearest,
        }
        print(json.dumps({"error": error}))
        return exit_code
    print(f"anabranch: {message}", file=sys.stderr)
    if numbers:
        print("  " + ", ".join(f"{k} = {v}" for k, v in numbers.items()), file=sys.stderr)
    if nearest:
        print(f"  nearest that runs: {nearest}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    app()
