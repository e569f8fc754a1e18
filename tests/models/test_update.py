"""`LLM.update_weights` in place: the next prefill and the next decode of every rank see it (T7)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
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
