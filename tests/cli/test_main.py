"""The command line itself: flags, errors, exit codes, speed of its help."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from anabranch.cli.flags import collect, flags
from anabranch.cli.main import cli, run
from anabranch.core.config import ENGINE_FIELDS, EngineConfig
from anabranch.server.options import ServeOptions

SOURCE = Path(__file__).parent.parent.parent / "src"

# frozen: outside callers use these names
ENGINE_FLAGS = [
    "--device",
    "--dtype",
    "--threads",
    "--cores",
    "--ranks",
    "--transport",
    "--tp",
    "--attn-dp",
    "--attn-cp",
    "--dcp",
    "--ep",
    "--kv",
    "--decode-attn",
    "--dcp-exchange",
    "--dcp-q",
    "--dcp-interleave",
    "--cp-split",
    "--kv-to-q",
    "--row-moves",
    "--moe-dispatch",
    "--lm-head",
    "--shared-experts",
    "--embedding",
    "--residual",
    "--force",
    "--max-model-len",
    "--max-running",
    "--max-waiting",
    "--page-size",
    "--prefill-chunk",
    "--workspace-tokens",
    "--kv-memory",
    "--kv-pages",
    "--kv-dtype",
    "--quant",
    "--prefix-cache",
    "--no-prefix-cache",
    "--load-format",
    "--seed",
    "--debug",
    "--debug-dir",
    "--ops",
]
SERVE_FLAGS = [
    "--host",
    "--port",
    "--api-key",
    "--cors",
    "--insecure",
    "--served-model-name",
    "--chat-template",
    "--max-body",
    "--drain",
    "--log-requests",
    "--json",
]
COMMANDS = {"demo", "serve", "generate", "score", "chat", "pull", "env", "eval", "bench"}


def options(*path: str) -> set[str]:
    command = typer.main.get_command(cli)
    for name in path:
        command = command.commands[name]
    found = [p for p in command.params if p.param_type_name == "option"]
    return {o for p in found for o in (*p.opts, *p.secondary_opts)} - {"--help"}


def test_the_flag_list_is_frozen() -> None:
    assert options("serve") == set(ENGINE_FLAGS) | set(SERVE_FLAGS)
    for path in (("generate",), ("score",), ("chat",), ("eval", "arithmetic"), ("eval", "gsm8k")):
        assert set(ENGINE_FLAGS) <= options(*path), path
    assert set(ENGINE_FLAGS) == {
        "--" + name.replace("_", "-") for name in ENGINE_FIELDS if name != "model"
    } | {"--no-prefix-cache"}
    assert options("score") - set(ENGINE_FLAGS) == {"--ids", "--decode-from", "--out", "--json"}
    assert set(typer.main.get_command(cli).commands) >= COMMANDS


def test_flags_become_the_dataclass() -> None:
    seen: list[object] = []
    app = typer.Typer()

    @app.command()
    @flags(config=EngineConfig, options=ServeOptions)
    def serve(config: EngineConfig, options: ServeOptions, extra: int = 3) -> None:
        seen.extend([config, options, extra])

    command = typer.main.get_command(app)
    command.main([], standalone_mode=False)
    assert seen == [EngineConfig(), ServeOptions(), 3]
    seen.clear()
    words = "m --tp 4 --no-prefix-cache --kv striped --force --port 1 --extra 5 --kv-pages 7"
    command.main(words.split(), standalone_mode=False)
    assert seen == [
        EngineConfig(model="m", tp=4, prefix_cache=False, kv="striped", force=True, kv_pages=7),
        ServeOptions(port=1),
        5,
    ]


def test_choices_are_checked() -> None:
    values = {f: getattr(EngineConfig(), f) for f in ENGINE_FIELDS}
    with pytest.raises(ValueError, match="--kv both: choose one of striped, replicated"):
        collect(EngineConfig, values | {"kv": "both"})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("serve --kv both", "invalid"),
        ("serve --bogus", "usage"),
        ("serve --tp two", "usage"),
        ("nonsense", "usage"),
        ("serve --host 0.0.0.0", "invalid"),
        ("serve nothing-of-that-name", "invalid"),
        ("serve m --dp 2", "invalid"),
        ("serve m --trust-remote-code", "invalid"),
        ("generate nothing-of-that-name --prompt x", "invalid"),
        ("generate m --url http://127.0.0.1:1 --prompt x", "invalid"),
        ("pull nothing-of-that-name", "invalid"),
        ("score nothing --ids /nothing --out /nothing", "failed"),
    ],
)
def test_refusals_are_json_on_demand(
    words: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words.split(), "--json"]) == (1 if code == "failed" else 2)
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == code and error["message"]
    assert set(error) == {"code", "message", "numbers", "nearest"}


def test_errors_are_one_line_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--kv", "both"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"anabranch: --kv both: .*\n", captured.err)


def test_a_refused_layout_has_numbers_and_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 6, "num_key_value_heads": 3,
        "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 256,
        "head_dim": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["serve", str(tmp_path), "--load-format", "dummy", "--tp", "4", "--port", "0", "--json"]
    assert run(words) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] not in ("invalid", "failed") and error["numbers"]
    assert error["nearest"] and "--tp" in error["nearest"]


def test_the_resolved_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "nothing", "--tp-size", "2"]) == 2
    assert "resolved: anabranch serve nothing --tp 2\n" in capsys.readouterr().err


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(SOURCE))
    return subprocess.run(
        [sys.executable, "-m", "anabranch.cli.main", *words],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip


def test_help_answers_at_once() -> None:
    """Of CPU time, so that a busy machine does not matter; and by what is not imported."""
    begin = os.times()
    done = command("--help")
    spent = os.times()
    assert done.returncode == 0 and "serve" in done.stdout
    assert (spent.children_user + spent.children_system) - (
        begin.children_user + begin.children_system
    ) < 0.6
    code = "import sys, anabranch.cli.main as m; print(*sys.modules)"
    environment = dict(os.environ, PYTHONPATH=str(SOURCE))
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    ).stdout.split()
    heavy = {"torch", "numpy", "fastapi", "uvicorn", "httpx", "tokenizers", "rich", "jinja2"}
    assert not heavy & set(loaded)


def test_env_tells_of_this_machine() -> None:
    done = command("env", "--json")
    facts = json.loads(done.stdout)
    assert facts["anabranch"] and facts["cores"] and facts["packages"]["numpy"]
    assert "smollm2-135m-instruct" in facts["catalogue"]


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    import socket

    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        begin = time.monotonic()
        done = command("serve", str(tmp_path), "--port", str(sock.getsockname()[1]))
        assert done.returncode == 1 and "cannot listen on 127.0.0.1" in done.stderr
        assert "Traceback" not in done.stderr and time.monotonic() - begin < 30
