"""How long `anabranch` takes to start: from exec to the first streamed token, and to a help text.

    python bench/startup.py [OUT.json] [--model NAME] [--runs 5]

The clock starts before the process does. A client asks for a streamed completion as soon as the
port accepts connections and again until it is served, as an impatient user would. Wanted: median of
the first token <= 4 s with SmolLM2 (its GGUF already in the cache), `--help` <= 0.3 s.
"""

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import httpx

ROOT = Path(__file__).parent.parent
BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "stream": True}
LIMIT = 300.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "anabranch.cli.main", *words]


def environment() -> dict[str, str]:
    """Ours, with bytecode kept: an installed package has it."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT / "src")}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def help_seconds() -> float:
    begin = time.perf_counter()
    subprocess.run(command("--help"), env=environment(), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def serve_seconds(model: str) -> tuple[float, float]:
    """Seconds from exec to /health 200, and to the first streamed token."""
    port = free_port()
    begin = time.perf_counter()
    words = command("serve", model, "--port", str(port), "--max-model-len", "2048")
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
    server = subprocess.Popen(words, env=environment(), stdout=said, stderr=said)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as http:
            ready = _until_ready(http, server, begin)
            return ready, _first_token(http, begin)
    except RuntimeError as error:
        said.seek(0)
        raise RuntimeError(f"{error}: {said.read()[-500:]}") from None
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        said.close()


def _until_ready(http: httpx.Client, server: "subprocess.Popen[bytes]", begin: float) -> float:
    while time.perf_counter() - begin < LIMIT:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            if http.get("/health").status_code == 200:
                return time.perf_counter() - begin
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise TimeoutError(f"not ready within {LIMIT:g} s")


def _first_token(http: httpx.Client, begin: float) -> float:
    with http.stream("POST", "/v1/completions", json=BODY) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                return time.perf_counter() - begin
    raise RuntimeError("the stream had no token")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("out", nargs="?", type=Path)
    args = parser.parse_args(argv)
    helps = [help_seconds() for _ in range(args.runs)]
    starts = [serve_seconds(args.model) for _ in range(args.runs)]
    ready, first = (median(values) for values in zip(*starts, strict=True))
    rows = [
        {"what": f"exec to first streamed token, {args.model}", "seconds": round(first, 2),
         "wanted": 4.0, "runs": [round(f, 2) for _, f in starts]},
        {"what": "exec to /health 200", "seconds": round(ready, 2), "wanted": None,
         "runs": [round(r, 2) for r, _ in starts]},
        {"what": "anabranch --help", "seconds": round(median(helps), 3), "wanted": 0.3,
         "runs": [round(h, 3) for h in helps]},
    ]  # fmt: skip
    found = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "command": f"python bench/startup.py --model {args.model} --runs {args.runs} OUT",
        "result": {"rows": rows},
    }
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if first <= 4.0 and median(helps) <= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
