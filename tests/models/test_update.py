"""`LLM.update_weights` in place: the next prefill and the next decode of every rank see it (T7).

Tensors come as released: packed ones with their scales, several in one memory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import oracle
from tests.layouts import prompt
from tests.models.tiny import make

from anabranch.engine.llm import LLM

COMMON = {"device": "cpu", "dtype": "float32", "kv_pages": 32, "ops": "reference", "threads": 1}
LAYOUTS = {
    "one process": {},
    "cp2 + decode TP, stripes": {"tp": 2, "attn_cp": 2, "ranks": "threads"},
    "tp2, experts by index": {"tp": 2, "ep": 2, "ranks": "threads"},
}
NAMES = ["GptOss", "DeepseekV4"]
IDS = prompt(45, 3)


@pytest.fixture(scope="module", params=NAMES)
def two(request, tmp_path_factory) -> Iterator[tuple[Path, dict[str, torch.Tensor], np.ndarray]]:
    """A checkpoint's folder, another checkpoint of the same shapes, and the other one's logits."""
    folder = tmp_path_factory.mktemp(request.param)
    first = make(request.param, folder / "first")
    second = make(request.param, folder / "second", seed=1)
    tensors = load_file(second.folder / "model.safetensors")
    return first.folder, tensors, second.score(IDS).numpy()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_prefill_and_decode_see_new_weights(layout: str, two) -> None:
    folder, tensors, want = two
    with LLM(folder, **COMMON, **LAYOUTS[layout]) as llm:
        old = llm.score(IDS, decode_from=40)
        assert np.abs(old - want).max() > 1
        with pytest.raises(ValueError, match="no tensor 'nonsense'"):
            llm.update_weights({**tensors, "nonsense": torch.zeros(1)})
        np.testing.assert_array_equal(llm.score(IDS, decode_from=40), old)
        llm.update_weights(tensors)
        got = llm.score(IDS, decode_from=40)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", ["one process", "cp2 + decode TP, stripes"])
def test_fp8_blocks_are_applied_with_their_scales(layout: str, tmp_path: Path) -> None:
    first = oracle.make("deepseek_v3_fp8", tmp_path / "first")
    second = oracle.make("deepseek_v3_fp8", tmp_path / "second", seed=1)
    tensors = {n: t for n, t in _saved(second.folder).items() if "layers.3." not in n}
    key = "model.layers.0.self_attn.o_proj.weight"
    assert tensors[key].dtype == torch.float8_e4m3fn
    alone = {
        f"{key}' is torch.float8": {key: tensors[key]},
        f"{key}' is torch.int32": {key: torch.ones(tensors[key].shape, dtype=torch.int32)},
        f"no tensor '{key}_scale_inv'": {f"{key}_scale_inv": tensors[f"{key}_scale_inv"]},
    }
    with LLM(first.folder, **COMMON, **LAYOUTS[layout]) as llm:
        old = llm.score(IDS, decode_from=40)
        for message, given in alone.items():
            with pytest.raises(ValueError, match=message):
                llm.update_weights({"model.norm.weight": tensors["model.norm.weight"], **given})
        np.testing.assert_array_equal(llm.score(IDS, decode_from=40), old)
        pair = {name: tensors[name] for name in (key, f"{key}_scale_inv")}
        llm.update_weights(pair)
        packed = llm.score(IDS, decode_from=40)
        assert np.abs(packed - old).max() > 0.1
        wide = pair[f"{key}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = pair[key].shape
        llm.update_weights({key: pair[key].float() * wide[:rows, :columns]})
        np.testing.assert_array_equal(llm.score(IDS, decode_from=40), packed)
        llm.update_weights(tensors)
        got = llm.score(IDS, decode_from=40)
    np.testing.assert_allclose(got, second.score(list(IDS)).numpy(), atol=1e-4, rtol=0)


@pytest.mark.timeout(120)
def test_tensors_that_share_memory(tmp_path: Path) -> None:
    first = oracle.make("llama", tmp_path / "llama")
    table = torch.nn.Parameter(torch.randn(oracle.VOCAB, 96))
    both = torch.randn(2, 64, 96)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("k", "v")]
    given = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    given |= dict(zip(names, both, strict=True))
    with LLM(first.folder, **COMMON) as llm:
        llm.update_weights(given)
        with pytest.raises(ValueError, match="no tensor 'head'"):
            llm.update_weights({"head": table, "lm_head.weight": table})
        got = llm.score(IDS)
    with torch.no_grad():
        first.model.load_state_dict(given, strict=False)
    np.testing.assert_allclose(got, first.score(list(IDS)).numpy(), atol=1e-4, rtol=1e-4)
