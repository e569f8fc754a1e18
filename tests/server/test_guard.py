"""Who may enter: default-deny on the raw path, whatever Host, Origin or encoding say."""

import socket
from collections.abc import Callable

import httpx
import pytest
from server_process import ServerProcess

from anabranch.server.options import ServeOptions

ROUTES = ["/ready", "/metrics", "/server_info", "/v1/models", "/v1/models/tiny",
          "/v1/completions", "/v1/chat/completions", "/nothing", "/", "//health", "/health/",
          "/health/x", "/%68ealth", "/HEALTH", "/docs", "/openapi.json", "/redoc",
          "/v1/../health", "/health/../v1/models", "/health;x"]  # fmt: skip


def raw(url: str, data: bytes) -> bytes:
    """The begin of a server's answer to hand-written bytes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(data)
        sock.settimeout(5)
        return sock.recv(4096)


@pytest.fixture(scope="module")
def locked(tiny_folder):
    server = ServerProcess(tiny_folder, "--api-key", "sésame").wait_ready()
    yield server
    assert server.end() == 0


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", ROUTES)
def test_every_route_asks_for_the_key(locked: ServerProcess, path: str, method: str) -> None:
    answer = raw(locked.url, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 401"), answer


def test_health_is_open(locked: ServerProcess) -> None:
    assert httpx.get(locked.url + "/health").status_code == 200
    assert httpx.get(locked.url + "/health?x=1").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/models HTTP/1.1\r\nHost: x/health?",
        "GET /v1/models HTTP/1.1\r\nHost: localhost/health#",
        "GET /v1/models?/health HTTP/1.1\r\nHost: x",
        "GET /v1/models#/health HTTP/1.1\r\nHost: x",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Prefix: /health",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Original-URL: /health",
        "GET http://x/v1/models HTTP/1.1\r\nHost: x",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Basic c2VzYW1l",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Api-Key: s\u00e9same",
    ],
)
def test_tricks_do_not_open_the_door(locked: ServerProcess, head: str) -> None:
    answer = raw(locked.url, head.encode() + b"\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400")), answer


def test_the_key_opens_it(locked: ServerProcess) -> None:
    headers = {"Authorization": "Bearer sésame".encode()}
    assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 200
    assert httpx.get(locked.url + "/docs", headers=headers).status_code == 404
    refused = httpx.get(locked.url + "/v1/models")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"


def test_other_sites_pages_may_not_use_an_open_server(server: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for origin, status in (
        ("https://evil.example", 403), ("null", 403), ("http://[", 403),
        ("http://localhost:3000", 200), ("http://127.0.0.1", 200),
    ):  # fmt: skip
        reply = httpx.post(server.url + "/v1/completions", json=body, headers={"Origin": origin})
        assert reply.status_code == status, origin


def test_cors(start: Callable[..., ServerProcess]) -> None:
    url = start("--cors", "https://app.example").url
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    before = httpx.options(url + "/v1/completions", headers=headers)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "https://app.example"
    reply = httpx.post(url + "/v1/completions", json={"prompt": "x"}, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    other = httpx.get(url + "/v1/models", headers={"Origin": "https://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


def test_bodies_have_a_limit_however_they_are_sent(start: Callable[..., ServerProcess]) -> None:
    url = start("--max-body", "2048").url
    big = b'{"prompt": "' + b"x" * 5000 + b'"}'
    assert httpx.post(url + "/v1/completions", content=big).status_code == 413

    def parts():
        for i in range(0, len(big), 100):
            yield big[i : i + 100]

    reply = httpx.post(url + "/v1/completions", content=parts())
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
    assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200


def test_the_routers_own_errors_have_the_apis_form(server: ServerProcess) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/nope", 404)):
        reply = httpx.request(method, server.url + path)
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_addresses_beyond_this_machine_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ValueError, match="--api-key"):
            ServeOptions(host=host).check()
        ServeOptions(host=host, api_key="k").check()
        ServeOptions(host=host, insecure=True).check()
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"):
        ServeOptions(host=host).check()


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"api_key": ""}, "empty"), ({"port": 70000}, "65535"), ({"max_body": 0}, "1024"),
     ({"drain": -1.0}, "drain")],
)  # fmt: skip
def test_bad_options(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServeOptions(**fields).check()
