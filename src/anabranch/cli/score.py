"""`anabranch score`: logits of given ids, straight from the engine.

Owns reading ids and writing the array.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.cli.front import local_service
from anabranch.core.config import EngineConfig
from anabranch.core.request import Request
from anabranch.server.options import ServeOptions
from anabranch.server.service import Service


def run(
    config: EngineConfig, ids_file: Path, decode_from: int | None, out: Path, as_json: bool
) -> int:
    """Write float32 [T, V]: row t holds the logits after ids 0..t."""
    ids = read_ids(ids_file)

    async def work() -> NDArray[np.float32]:
        async with local_service(config, ServeOptions()) as service:
            return await score(service, ids, decode_from)

    logits = asyncio.run(work())
    with out.open("wb") as file:  # np.save on a name would add a suffix
        np.save(file, logits)
    if as_json:
        print(json.dumps({"out": str(out), "shape": list(logits.shape)}))
    else:
        print(f"{out}: float32 {list(logits.shape)}")
    return 0


def read_ids(file: Path) -> tuple[int, ...]:
    """Token ids of a .npy of integers, a JSON list, or numbers with spaces or commas between."""
    if file.suffix == ".npy":
        found = np.load(file, allow_pickle=False)
        if found.dtype.kind not in "iu":
            raise ValueError(f"{file}: holds {found.dtype}, wanted integers")
        return tuple(int(i) for i in found.reshape(-1))
    text = file.read_text(encoding="utf-8")
    words = text.replace("[", " ").replace("]", " ").replace(",", " ").split()
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ValueError(f"{file}: not a list of token ids ({error})") from None


async def score(
    service: Service, ids: tuple[int, ...], decode_from: int | None
) -> NDArray[np.float32]:
    """Logits [T, V] of `ids`: the first `decode_from` by prefill, the rest decoded one by one."""
    ready = service.ready
    assert ready is not None, "score before ready"
    request = Request("score", ids, score_from=len(ids) if decode_from is None else decode_from)
    request.check(ready.vocab_size, ready.max_model_len)
    rows: dict[int, NDArray[np.float32]] = {}
    async for output in service.engine.submit(request):
        if output.error is not None:
            raise RuntimeError(output.error)
        for start, data in output.logits:
            rows[start] = np.frombuffer(data, np.float32).reshape(-1, ready.vocab_size)
    logits = np.concatenate([rows[start] for start in sorted(rows)]) if rows else np.zeros((0, 0))
    if logits.shape != (len(ids), ready.vocab_size):
        raise RuntimeError(f"the engine sent logits {logits.shape} for {len(ids)} ids")
    return logits.astype(np.float32, copy=False)
