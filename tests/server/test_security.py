"""One test for each class of faults that servers of this kind have had."""

from __future__ import annotations

import ast
import hmac
import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from server_helpers import Running, serving

from pagedllm.errors import ConfigError
from pagedllm.server import auth
from pagedllm.server.auth import ApiKey, read_key_file, read_keys
from pagedllm.server.config import ServerConfig
from pagedllm.wire import paths

SOURCES = [path for name in ("server", "wire") for path in (Path(auth.__file__).parents[1] / name).glob("*.py")]
KEY = ApiKey(name="only", secret="a-long-secret")
GET_PATHS = ("/ready", "/metrics", "/version", "/v1/models", "/v1/cache/stats", "/openapi.json", "/docs", "/nope", "/")
POST_PATHS = (*paths.GENERATE.values(), "/tokenize", "/detokenize", "/v1/cache/warm", "/v1/cache/match")


def imported_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return names | {node.module or "" for node in froms}


def test_nothing_is_unpickled_or_fetched() -> None:
    """Pickle on sockets was the way into many engines; a client of HTTP in a server is the way to other machines."""
    assert SOURCES
    forbidden = ("pickle", "marshal", "shelve", "dill", "httpx", "requests", "urllib.request", "aiohttp", "subprocess")
    for path in SOURCES:
        assert not imported_names(path) & set(forbidden), path


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_key_on_every_path_but_health(fake: FakeEngine, method: str) -> None:
    """Keys that guard only some paths leave the rest open, among them those nobody thought of."""
    with serving(fake, api_keys=(KEY,)) as running:
        for path in (*GET_PATHS, *POST_PATHS, "/v1/cache/reset"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic YTpi"}):
                answer = running.client.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
                assert answer.headers["www-authenticate"] == "Bearer"
        assert running.client.get("/health").status_code == 200
        assert running.client.get("/v1/models", headers={"Authorization": f"Bearer {KEY.secret}"}).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are compared, whole, whichever is right: the time of an answer tells nothing."""
    compared = []

    def compare(first: Any, second: Any) -> bool:
        compared.append((len(first), len(second)))
        return original(first, second)

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = auth.KeyRing([KEY, ApiKey(name="b", secret="another-secret"), ApiKey(name="c", secret="a-third-secret")])
    for secret in (KEY.secret, "a-third-secret", "x"):
        compared.clear()
        ring.find(f"Bearer {secret}")
        assert compared == [(32, 32)] * 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.com"])
def test_reachable_address_needs_keys(host: str) -> None:
    """Servers that listen everywhere by default are found by strangers."""
    assert ServerConfig().host == "127.0.0.1"
    with pytest.raises(ConfigError, match="host"):
        ServerConfig(host=host)
    ServerConfig(host=host, api_keys=(KEY,))
    ServerConfig(host=host, allow_unauthenticated=True)


def test_web_pages_cannot_ask(server: Running) -> None:
    """A page may send a form to this machine unasked, or come under a name that was made to point here."""
    body = json.dumps({"prompt": "a"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415
    assert server.client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
    assert server.client.get("/v1/models", headers={"Host": "localhost:1234"}).status_code == 200
    assert "access-control-allow-origin" not in server.client.get("/v1/models", headers={"Origin": "http://x"}).headers


@pytest.mark.parametrize(
    "fields",
    [
        *({"n": 129}, {"n": 10**6}, {"prompt": ["a"] * 129}, {"prompt": ["a"] * 20, "n": 20}, {"logprobs": 21}),
        *({"stop": ["x"] * 17}, {"stop": "x" * 1025}, {"logit_bias": {str(i): 1 for i in range(1025)}}),
        *({"max_tokens": 10**30}, {"seed": 10**30}, {"top_k": -(10**9)}, {"min_tokens": -1}, {"n": -1}),
        *({"prompt": [-1]}, {"prompt": [2**63]}, {"stop_token_ids": [-1]}, {"logit_bias": {"-5": 1}}),
        *({"temperature": -1}, {"prompt_logprobs": 10**9}, {"priority": 2**40}),
        *({"cache_hints": {"retain": [{"num_tokens": -1}]}}, {"cache_hints": {"retain": [{}] * 17}}),
    ],
)
def test_fan_out_and_integers(server: Running, fields: dict[str, Any]) -> None:
    """Unbounded counts multiply work; numbers out of range reached kernels."""
    answer = server.client.post("/v1/completions", json={"prompt": "a", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]


def test_long_bodies(fake: FakeEngine) -> None:
    """A body must be refused by its announcement, and while it comes if it was announced as shorter or not at all."""
    with serving(fake, max_body_bytes=1000) as running:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        kind = {"Content-Type": "application/json"}
        assert running.client.post("/v1/completions", content=body, headers=kind).status_code == 413
        pieces = (body[at : at + 100] for at in range(0, len(body), 100))
        assert running.client.post("/v1/completions", content=pieces, headers=kind).status_code == 413
        assert fake.requests == []


def test_long_heads(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000)
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 50_000, b"{" + b'"a":1,' * 10, b"\xff\xfe", b"null", b"9" * 9999]
)
def test_malformed_bodies(server: Running, text: bytes) -> None:
    """Nesting, broken encodings and huge numbers end as errors of the request."""
    for path in POST_PATHS:
        answer = server.client.post(path, content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ x }}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"prompt_embeds": "AAAA"},
        {"documents": [{"text": "x"}]},
        {"mm_processor_kwargs": {}},
        {"guided_regex": "(a+)+"},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"logits_processors": ["os.system"]},
        {"lora_request": "/etc/passwd"},
        {"tools": [{"type": "code_interpreter", "container": "/etc"}]},
    ],
)
def test_no_templates_tensors_grammars_or_paths(server: Running, fields: dict[str, Any]) -> None:
    """Templates of clients ran code, their tensors wrote memory, their patterns never ended."""
    answer = server.chat("a", **fields)
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]["message"]


def test_no_outbound_fetch(server: Running) -> None:
    """A URL in a message must not make the server ask it."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "input_audio": {}}):
            assert server.chat([part]).status_code == 400
        with pytest.raises(TimeoutError):
            trap.accept()


def test_faults_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An exception's text may hold an address or a prompt; neither client nor log may see it."""
    prompt = "my secret prompt"
    engine = FakeEngine(errors={prompt: RuntimeError(f"at 0x7f00: {prompt}")})  # type: ignore[dict-item]
    with serving(engine) as running, caplog.at_level(logging.DEBUG, logger="pagedllm"):
        for path, body in (
            ("/v1/completions", {"prompt": prompt}),
            ("/v1/completions", {"prompt": prompt, "stream": True}),
            ("/v1/cache/warm", {"prompt": prompt}),
        ):
            answer = running.client.post(path, json=body)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "internal error"
    assert "RuntimeError" in caplog.text
    assert "0x7f00" not in caplog.text
    assert "secret" not in caplog.text


def test_requests_are_not_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Prompts are what users would least like to find in a log."""
    with caplog.at_level(logging.DEBUG), serving(FakeEngine()) as running:
        running.complete("my secret prompt", max_tokens=3)
        running.complete("my secret prompt", top_p=7)
        running.chat("my secret prompt", stream=True)
    output = capfd.readouterr()
    assert "secret" not in caplog.text + output.out + output.err


def test_path_of_the_model_is_not_told(tmp_path: Path) -> None:
    with serving(FakeEngine(model=str(tmp_path / "model"))) as running:
        models = running.client.get("/v1/models").text
        assert str(tmp_path) not in models
        assert running.client.get("/v1/models").json()["data"][0]["id"] == "model"
        assert str(tmp_path) not in running.complete("a", model="x").text


def test_large_bodies_do_not_block_others(fake: FakeEngine) -> None:
    """Encoding on the event loop would stop every stream and every health check meanwhile."""
    started, release = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def astream(self, request: Any) -> Any:
            started.set()
            release.wait(20)
            return super().astream(request)

    with serving(Slow()) as running:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(running.complete("a", max_tokens=2)))
        thread.start()
        try:
            assert started.wait(10)
            with httpx.Client(base_url=running.url, timeout=5) as other:
                assert other.get("/health").status_code == 200
                assert other.get("/v1/models").status_code == 200
        finally:
            release.set()
            thread.join()
        assert answers[0].status_code == 200


def test_key_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("# team keys\nalice secret-of-alice\nroot secret-of-root admin\n\n")
    path.chmod(0o600)
    keys = read_key_file(path)
    assert [(key.name, key.is_admin) for key in keys] == [("alice", False), ("root", True)]
    assert "secret-of-alice" not in repr(keys)
    assert not caplog.records
    path.chmod(0o644)
    read_key_file(path)
    assert "chmod 600" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "missing")


@pytest.mark.parametrize(
    "text", ["", "alice", "alice a b c", "alice secret-of-alice boss", "a/b secret-of-alice", "a short"]
)
def test_bad_keys(text: str) -> None:
    """The error names the place, never the secret."""
    with pytest.raises(ConfigError) as caught:
        read_keys(text, "KEYS")
    assert "secret-of" not in str(caught.value)


def test_keys_must_differ() -> None:
    twice = [KEY, ApiKey(name="other", secret=KEY.secret)]
    with pytest.raises(ConfigError, match="secrets must differ"):
        auth.KeyRing(twice)
