"""`LLM` and `AsyncLLM`: a model as a Python object.

With one rank, or with ranks as threads, `LLM` runs the model in this process and in the caller's
thread; with ranks as processes, and always for `AsyncLLM`, it starts the same process tree as the
server. Text comes from `text`, everything else from the brain.
"""

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from anabranch.core.config import ENGINE_FIELDS, EngineConfig
from anabranch.core.messages import Output, Ready, Stats
from anabranch.core.request import Request, SamplingParams
from anabranch.engine.client import EngineClient
from anabranch.engine.completion import Collector, Completion, Delta
from anabranch.engine.crew import RANK_MAKER
from anabranch.engine.ports import Box, InProcess, Port, Remote
from anabranch.engine.prepare import Prepared, prepare
from anabranch.engine.remote import place_of_process, serve_if_rank
from anabranch.text.template import ChatTemplate
from anabranch.text.tokenizer import Json, Tokenizer

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int]
Message = Mapping[str, Json]
Option = str | int | bool | None


class _Texts:
    """Prompts to token ids and requests, for a checkpoint that may have no tokenizer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        has_one = path.is_file() or (path / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.load(path) if has_one else None
        self._template = None if self.tokenizer is None else ChatTemplate.of(self.tokenizer)
        self._numbers = itertools.count()

    def request(self, prompt: Prompt, sampling: SamplingParams | None, ready: Ready) -> Request:
        """FieldError for what cannot be served."""
        sampling = sampling or SamplingParams()
        if isinstance(prompt, str):
            ids = self._need().encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        if sampling.stop:
            self._need()
        if self.tokenizer is not None:
            sampling = sampling.with_ends(self.tokenizer.eos_ids, ready.vocab_size)
        request = Request(self._new_id(), tuple(ids), sampling)
        return request.check(ready.vocab_size, ready.max_model_len)

    def scoring(self, ids: Sequence[int], decode_from: int | None, ready: Ready) -> Request:
        """A request for the logits of given ids. FieldError for what cannot be served."""
        split = len(ids) if decode_from is None else decode_from
        request = Request(self._new_id(), tuple(int(i) for i in ids), score_from=split)
        return request.check(ready.vocab_size, ready.max_model_len)

    def _new_id(self) -> str:
        return f"llm-{next(self._numbers)}"

    def chat(self, messages: Sequence[Message], variables: Mapping[str, Json] | None) -> list[int]:
        tokenizer = self._need()
        if self._template is None:
            raise ValueError(f"{self._path} has no chat template; use generate")
        text = self._template.render(messages, variables=variables)
        return tokenizer.encode(text, add_special=False)

    def _need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self._path} has no tokenizer; give token ids, and no stop strings")
        return self.tokenizer

    def close(self) -> None:
        if self._template is not None:
            self._template.close()


class LLM(AbstractContextManager["LLM"]):
    """A loaded model: a folder, hub id, .gguf file or catalogue name; None is the demo model.

    options: the fields of `EngineConfig`, such as tp, attn_dp, attn_cp, dcp, ranks, dtype. Raises
    ValueError or Refusal for what cannot run. Close it, or use it as a context manager.

    In a script that torchrun runs on every rank, only rank 0 gets past this: the others serve it
    here, and end (SystemExit) when it closes.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        maker: str = RANK_MAKER,
        **options: Option,
    ) -> None:
        config = _config(model, options)
        if serve_if_rank(config, maker):
            raise SystemExit(0)
        prepared = prepare(config)
        self.config = config
        self._texts = _Texts(prepared.path)
        world = prepared.run.layout.mesh.world
        self._port: Port
        if world == 1 or config.ranks == "threads" or place_of_process(config) is not None:
            self._port = InProcess(prepared, maker)
        else:
            self._port = Remote(config, prepared, maker)
        self._window = min(config.max_waiting, 2 * config.max_running * config.attn_dp)

    @property
    def ready(self) -> Ready:
        """Vocabulary, context length, end tokens, and what /server_info says."""
        return self._port.ready

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._texts.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions of one prompt or many (strings or token ids), in their order.

        sampling: for all, or one per prompt. FieldError, before anything runs, for what cannot be
        served.
        """
        many = _prompts(prompts)
        params = _per_prompt(sampling, len(many))
        ready = self.ready
        requests = [self._texts.request(p, s, ready) for p, s in zip(many, params, strict=True)]
        collectors = {r.id: Collector(r, self.tokenizer) for r in requests}
        for output in self._outputs(requests):
            self._take(collectors[output.id], output)
        return [collectors[r.id].result() for r in requests]

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        template_variables: Mapping[str, Json] | None = None,
    ) -> Completion:
        """The model's answer to one conversation, rendered with the checkpoint's chat template."""
        return self.generate([self._texts.chat(messages, template_variables)], sampling)[0]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Deltas of one prompt while they arrive. Leaving early aborts it."""
        request = self._texts.request(prompt, sampling, self.ready)
        collector = Collector(request, self.tokenizer)
        for output in self._outputs([request]):
            yield self._take(collector, output)
            if collector.finish_reason is not None:
                return

    def score(self, ids: Sequence[int], decode_from: int | None = None) -> NDArray[np.float32]:
        """Logits float32 [T, V] of T given ids: row t is what follows ids[0..t].

        The first `decode_from` (default: all) are computed by prefill, the rest one by one as
        decode steps, each given its id.
        """
        request = self._texts.scoring(ids, decode_from, self.ready)
        return _logits(list(self._outputs([request])), len(ids))

    def update_weights(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Write whole checkpoint tensors, by released name, in place on every rank.

        Tensors may share memory. Packed ones come with their scales, as released. The next step of
        every phase sees them; cached prefixes are forgotten. ValueError, with nothing written, for
        unknown names, wrong shapes, packed floats without scales, and integers for floats.
        """
        self._port.control("update_weights", _packed(tensors))

    def stats(self) -> Stats:
        return self._port.stats()

    def close(self) -> None:
        """End the ranks. Nothing can be asked afterwards."""
        self._port.close()
        self._texts.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, collector: Collector, output: Output) -> Delta:
        delta = collector.take(output)
        if collector.stopped and output.finish_reason is None and delta.finish_reason is not None:
            self._port.abort(output.id)
        return delta

    def _outputs(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Outputs of all requests as they come; a bounded number of requests is in at a time."""
        todo, running, box = deque(requests), set[str](), Box()
        try:
            while todo or running:
                while todo and len(running) < self._window:
                    request = todo.popleft()
                    running.add(request.id)
                    self._port.submit(request, box)
                self._port.fill(box)
                while box.items:
                    output = box.items.popleft()
                    if output.finish_reason is not None:
                        running.discard(output.id)
                    yield output
        finally:
            for request_id in running:
                self._port.abort(request_id)


class AsyncLLM(AbstractAsyncContextManager["AsyncLLM"]):
    """`LLM` for asyncio; many coroutines may ask at once. Made by `await AsyncLLM.start(...)`."""

    def __init__(self, client: EngineClient, path: Path) -> None:
        self.client = client
        self._texts = _Texts(path)

    @staticmethod
    async def start(
        model: str | Path | None = None,
        *,
        maker: str = RANK_MAKER,
        **options: Option,
    ) -> "AsyncLLM":
        """Start the engine's processes and wait until the model is loaded."""
        config = _config(model, options)
        prepared: Prepared = prepare(config)
        client = await EngineClient.start(config, prepared, maker)
        try:
            await client.wait_ready()
        except BaseException:
            await client.shutdown()
            raise
        return AsyncLLM(client, prepared.path)

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Completion:
        collector = self._collector(prompt, sampling)
        async with aclosing(self._deltas(collector)) as deltas:
            async for _ in deltas:
                pass
        return collector.result()

    async def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None
    ) -> Completion:
        return await self.generate(self._texts.chat(messages, None), sampling)

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> AsyncGenerator[Delta]:
        """Deltas while they arrive. Leaving early aborts the request."""
        async with aclosing(self._deltas(self._collector(prompt, sampling))) as deltas:
            async for delta in deltas:
                yield delta

    async def score(
        self, ids: Sequence[int], decode_from: int | None = None
    ) -> NDArray[np.float32]:
        """See `LLM.score`."""
        request = self._texts.scoring(ids, decode_from, self._ready())
        async with aclosing(self.client.submit(request)) as outputs:
            return _logits([output async for output in outputs], len(ids))

    async def update_weights(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """See `LLM.update_weights`."""
        await self.client.control("update_weights", _packed(tensors))

    async def close(self) -> None:
        await self.client.shutdown()
        self._texts.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _ready(self) -> Ready:
        assert self.client.ready is not None, "asked before it was ready"
        return self.client.ready

    def _collector(self, prompt: Prompt, sampling: SamplingParams | None) -> Collector:
        request = self._texts.request(prompt, sampling, self._ready())
        return Collector(request, self._texts.tokenizer)

    async def _deltas(self, collector: Collector) -> AsyncGenerator[Delta]:
        async with aclosing(self.client.submit(collector.request)) as outputs:
            async for output in outputs:
                yield collector.take(output)
                if collector.finish_reason is not None:
                    return


def _logits(outputs: Sequence[Output], rows: int) -> NDArray[np.float32]:
    """The pieces of a scoring request's outputs, together [rows, V]. ValueError if it failed."""
    failed = [output.error for output in outputs if output.finish_reason == "error"]
    if failed:
        raise ValueError(failed[0])
    pieces = [data for output in outputs for _, data in output.logits]
    return np.frombuffer(b"".join(pieces), np.float32).reshape(rows, -1)


def _packed(tensors: "Mapping[str, torch.Tensor]") -> bytes:
    """A safetensors file, a format without shared memory."""
    from safetensors.torch import save

    apart: dict[str, torch.Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        memory = whole.untyped_storage().data_ptr()
        apart[name] = whole.clone() if memory in memories else whole
        memories.add(memory)
    return save(apart)


def _config(model: str | Path | None, options: Mapping[str, Option]) -> EngineConfig:
    unknown = sorted(options.keys() - set(ENGINE_FIELDS))
    if unknown:
        raise TypeError(f"unknown settings {unknown}; there are {sorted(ENGINE_FIELDS)}")
    name = None if model is None else str(model)
    return EngineConfig(model=name, **options)  # type: ignore[arg-type]


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(item, (int, np.integer)) for item in prompts):
        return [cast(Sequence[int], prompts)] if len(prompts) else []
    return list(cast(Sequence[Prompt], prompts))


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(f"{len(sampling)} sampling parameters for {count} prompts")
    return list(sampling)
