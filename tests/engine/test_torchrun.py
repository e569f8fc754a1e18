"""The same script under torchrun: ranks of one host, and of two made of network namespaces."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("torchrun_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Answer = tuple[list[list[int]], list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 8, "vocab_size": 1003, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "float32", "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(command: list[str], **env: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )


def finish(process: "subprocess.Popen[str]") -> str:
    try:
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, out
    return out


def answer(out: str) -> Answer:
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    tokens, logits = json.loads(line.removeprefix("RESULT "))
    return tokens, logits


def same(one: Answer, other: Answer) -> bool:
    return one[0] == other[0] and bool(np.abs(np.subtract(one[1], other[1])).max() < 1e-4)


@pytest.fixture(scope="module")
def alone(model: Path) -> Answer:
    return answer(finish(start([sys.executable, str(SCRIPT), str(model), "1", "1"])))


def test_one_host(model: Path, alone: Answer) -> None:
    run = [*TORCHRUN, "--nproc-per-node", "2", str(SCRIPT), str(model)]
    assert same(answer(finish(start([*run, "2", "2"]))), alone)


def test_wrong_number_of_ranks(model: Path) -> None:
    process = start([*TORCHRUN, "--nproc-per-node", "2", str(SCRIPT), str(model), "1", "1"])
    process.communicate(timeout=200)
    assert process.returncode != 0


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = ("anabranch-a", "anabranch-b")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [
            "ip",
            "link",
            "add",
            "ab0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "ab0",
        ]
        subprocess.run([*ends, "netns", names[1]], check=True)
        for i, name in enumerate(names):
            inside = ["ip", "-n", name]
            address = f"10.77.0.{i + 1}/24"
            subprocess.run([*inside, "addr", "add", address, "dev", "ab0"], check=True)
            subprocess.run([*inside, "link", "set", "ab0", "up"], check=True)
            subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_two_hosts(model: Path, alone: Answer, hosts: tuple[str, str]) -> None:
    processes = []
    for node, name in enumerate(hosts):
        where = ["--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", "29511"]
        run = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *where, str(SCRIPT), str(model)]
        command = ["ip", "netns", "exec", name, *run, "4", "2"]
        processes.append(start(command, GLOO_SOCKET_IFNAME="ab0"))
    outs = [finish(process) for process in processes]
    assert same(answer(outs[0]), alone) and "RESULT" not in outs[1]
