"""A model behind the API, whoever asks: this process's own server, or a client of any.

Owns how commands reach a model: `run_server` serves until told to end, `client` gives an HTTP
client of a running server, or of one on a free loopback port of this process, closed to others by a
random key.
"""

import json
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial

import httpx

from anabranch.core.config import EngineConfig, flag_name
from anabranch.engine.early import Early
from anabranch.server.options import ServeOptions
from anabranch.server.run import address, hosting, listen, serve
from anabranch.server.service import Service
from anabranch.text.template import ChatTemplate
from anabranch.text.tokenizer import Json, Tokenizer

DEMO_NAME = "anabranch-demo"
_TIMEOUT = httpx.Timeout(3600.0, connect=10.0)


def make_service(
    config: EngineConfig, options: ServeOptions, early: Early | None = None
) -> Service:
    """The front of the model that `config` names; early: the process that will be its engine.

    Under torchrun only rank 0 has a front: the other ranks serve it here, and end.
    """
    from anabranch.engine.client import EngineClient
    from anabranch.engine.remote import serve_if_rank
    from anabranch.weights.locate import locate

    if serve_if_rank(config):
        raise SystemExit(0)
    path = locate(config.model)
    names = options.names(config.model or DEMO_NAME)

    def load_text() -> tuple[Tokenizer, ChatTemplate | None]:
        if path.is_dir() and not (path / "tokenizer.json").is_file():
            print(f"{path} has no tokenizer: token ids only", file=sys.stderr, flush=True)
            return Tokenizer.without_text(path), None
        tokenizer = Tokenizer.load(path)
        return tokenizer, ChatTemplate.of(tokenizer, options.chat_template)

    connect = partial(EngineClient.start, early=early)
    return Service(replace(config, model=str(path)), options, names, connect, load_text)


def run_server(
    config: EngineConfig, options: ServeOptions, as_json: bool, early: Early | None
) -> int:
    """Serve until told to end. Prints where, and what is cached, once requests can be served."""
    service = make_service(config, options, early)
    sock = listen(options)

    def announce(url: str) -> None:
        ready = service.engine.ready
        assert ready is not None
        kv = json.loads(ready.info)["kv"]
        if as_json:
            event = {"event": "ready", "url": url, "models": service.names, "kv": kv}
            print(json.dumps(event), flush=True)
            return
        copies = "1 copy" if kv["copies"] == 1 else f"{kv['copies']} copies"
        print(
            f"serving {service.names[0]} on {url} (OpenAI API at {url}/v1)\n"
            f"KV cache: {kv['tokens']:,} tokens, {kv['bytes_per_token_per_rank']:,.0f} bytes a "
            f"token on each rank, {copies} of a token in a replica",
            flush=True,
        )

    return serve(service, sock, announce)


@asynccontextmanager
async def local_service(config: EngineConfig, options: ServeOptions) -> AsyncIterator[Service]:
    """A started service in this process, ended with the block."""
    service = make_service(config, options)
    print(f"loading {service.names[0]} ...", file=sys.stderr, flush=True)
    try:
        await service.start()
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def client(
    url: str | None, key: str | None, config: EngineConfig
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the server at `url`, or of MODEL loaded for this block."""
    if url is not None:
        if config.model is not None:
            raise ValueError("give MODEL or --url, not both")
        given = [flag_name(f.name) for f in fields(config) if getattr(config, f.name) != f.default]
        if given:
            raise ValueError(
                f"{', '.join(given)}: for a model that is loaded here; the server at --url has "
                "its own settings"
            )
        async with _http(url, key) as found:
            yield found
        return
    own = ServeOptions(port=0, api_key=secrets.token_hex(16))
    async with local_service(config, own) as service:
        sock = listen(own)
        async with hosting(service, sock), _http(address(sock), own.api_key) as found:
            yield found


def _http(url: str, key: str | None) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    base = url.rstrip("/").removesuffix("/v1")
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=_TIMEOUT, limits=limits)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Json]) -> dict[str, Json]:
    """The JSON answer. RuntimeError with the server's own words if it refuses."""
    reply = await _ask(client, "POST", path, body)
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.request.url} answered {reply.status_code}: {words_of(reply)}")
    found: dict[str, Json] = reply.json()
    return found


async def _ask(
    client: httpx.AsyncClient, method: str, path: str, body: dict[str, Json] | None = None
) -> httpx.Response:
    """The reply. RuntimeError names the address where none came: httpx's own words do not."""
    try:
        return await client.request(method, path, json=body)
    except httpx.TransportError as error:
        raise RuntimeError(f"{error.request.url}: {str(error) or type(error).__name__}") from error


def words_of(reply: httpx.Response) -> str:
    """The message of an error in OpenAI's form, or the begin of whatever came."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]


async def model_name(client: httpx.AsyncClient, name: str | None) -> str:
    """`name`, or the first model that the server lists."""
    if name is not None:
        return name
    reply = await _ask(client, "GET", "/v1/models")
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.request.url} answered {reply.status_code}: {words_of(reply)}")
    return str(reply.json()["data"][0]["id"])
