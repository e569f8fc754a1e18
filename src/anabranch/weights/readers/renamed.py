"""Checkpoints that transformers saved under other names than the release, read by the latter."""

from collections.abc import Callable, Collection, Mapping

import torch

from anabranch.weights.readers.base import Given, Reader
from anabranch.weights.recipe import Source


def deepseek_v4_name(found: str) -> str:
    """DeepSeek-V4's released name of a tensor that transformers 5 saved."""
    name = found.removeprefix("model.")
    name = name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace("lm_head.", "head.").replace(".attn.norm.", ".attn.kv_norm.")


RENAMED: dict[str, Callable[[str], str]] = {"DeepseekV4ForCausalLM": deepseek_v4_name}


class RenamedReader:
    """A reader whose tensors are known by other names. released: of a name in the checkpoint."""

    def __init__(self, inner: Reader, released: Callable[[str], str]) -> None:
        self._inner = inner
        self._released = released
        self._found = {released(name): name for name in inner.names()}

    def names(self) -> Collection[str]:
        return self._found.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._inner.shape(self._found.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        return self._inner.dtype(self._found.get(name, name))

    def read(self, source: Source) -> torch.Tensor:
        found = self._found.get(source.name, source.name)
        return self._inner.read(Source(found, source.shape, source.ranges))

    def given(self) -> Given:
        inner, released = self._inner.given(), self._released

        def made(tensors: Mapping[str, torch.Tensor]) -> Reader:
            return RenamedReader(inner(tensors), released)

        return made

    def release(self) -> None:
        self._inner.release()
