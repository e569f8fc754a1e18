"""Anabranch: an LLM inference engine in which every way of splitting attention gives one answer.

Owns the package's version and its public names, imported on first use so that ``import anabranch``
stays free of torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.core.request import SamplingParams
    from anabranch.engine.llm import LLM, AsyncLLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("LLM", "AsyncLLM"):
        from anabranch.engine import llm

        return vars(llm)[name]
    if name == "SamplingParams":
        from anabranch.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
