"""How a remote engine talks: once, again only if that is safe, and never longer than anybody wants to listen."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from remote_ways import ANSWER, CHAT, WAYS, Ways, agenerate, answer, astream, busy, chat, generate, stream
from scripted_server import Exchange, ScriptedServer, chat_event, until

from pagedllm.errors import (
    AuthenticationError,
    ConnectionFailedError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PagedLLMError,
    PermissionDeniedError,
    RateLimitError,
    ResponseTimeoutError,
)
from pagedllm.remote import RemoteConfig, RemoteEngine


@WAYS
def test_server_without_our_fields(make: Any, ask: Ways) -> None:
    """A vLLM server tells neither timings nor cached tokens; nothing of it may be needed."""
    server, engine = make(answer)
    assert ask(engine, chat()) == "Hello!"
    assert server.exchanges[0].body["model"] == "m"
    assert server.exchanges[0].body["messages"] == [{"role": "user", "content": "Hi"}]


def test_usage_and_times_of_a_server_without_our_fields(make: Any) -> None:
    """Times of zero would look like a very fast server."""
    _, engine = make(answer)
    (output,) = engine.generate([chat()])
    last = list(engine.stream(chat()))[-1]
    for usage, timings in ((output.usage, output.timings), (last.usage, last.timings)):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 2, 0)
        assert 0 < timings.ttft_s <= timings.total_s
    assert (output.choices[0].finish_reason, last.finish_reason) == ("stop", "stop")


@WAYS
def test_busy_server_is_asked_again(make: Any, ask: Ways) -> None:
    """A request that was refused as too many is the one that is safe to send again, under the same id."""
    server, engine = make([busy, busy, answer])
    assert ask(engine, chat()) == "Hello!"
    assert len({exchange.body["request_id"] for exchange in server.exchanges}) == 1
    assert len(server.exchanges) == 3


@WAYS
@pytest.mark.parametrize(
    ("status", "headers"),
    [(503, {}), (500, {"Retry_After": "0"}), (502, {"Retry_After": "0"}), (429, {"Retry_After": "0"})],
)
def test_other_refusals_are_not_sent_again(make: Any, ask: Ways, status: int, headers: dict[str, str]) -> None:
    """After any other failure the first copy may still be running, and a second would double its work."""
    server, engine = make(lambda exchange: exchange.json({"error": {"message": "no"}}, status, **headers))
    with pytest.raises(EngineError):
        ask(engine, chat())
    assert len(server.exchanges) == 1


@WAYS
def test_retries_end(make: Any, ask: Ways) -> None:
    server, engine = make(busy, max_retries=2)
    with pytest.raises(OverloadedError) as caught:
        ask(engine, chat())
    assert len(server.exchanges) == 3
    assert caught.value.response.status_code == 503  # type: ignore[attr-defined]


@WAYS
def test_connection_refused(ask: Ways) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = RemoteEngine(RemoteConfig(base_url=f"http://127.0.0.1:{port}/v1", model="m", max_retries=1))
    with pytest.raises(ConnectionFailedError, match=f"cannot connect to http://127.0.0.1:{port}/v1"):
        ask(engine, chat())
    assert not engine.health().ok
    engine.close()


def test_server_that_starts_meanwhile(make: Any) -> None:
    """A client that starts with its server should not have to be started again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = RemoteEngine(RemoteConfig(base_url=f"http://127.0.0.1:{port}/v1", model="m", max_retries=6))
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(generate(engine, chat())))
    thread.start()
    time.sleep(0.3)
    server = ScriptedServer({CHAT: answer}, port=port)
    with server, engine:
        thread.join(20)
        assert answers == ["Hello!"]


@WAYS
@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (401, {"error": {"message": "bad key"}}, AuthenticationError, "bad key"),
        (403, {"error": {"message": "admin only"}}, PermissionDeniedError, "admin only"),
        (404, {"error": {"message": "no model m"}}, ModelNotFoundError, "no model m"),
        (404, {"detail": "Not Found"}, EngineError, "does not offer /v1/chat/completions"),
        (400, {"error": {"message": "top_p", "param": "top_p"}}, InvalidRequestError, "top_p"),
        (400, {"error": {"message": "long", "code": "context_length_exceeded"}}, ContextLengthError, "long"),
        (429, {"error": {"message": "slow down"}}, RateLimitError, "slow down"),
        (504, "<html>gateway</html>", ResponseTimeoutError, "504"),
        (500, "", EngineError, "500"),
        (307, "", EngineError, "redirection"),
    ],
)
def test_error_classes(make: Any, ask: Ways, status: int, body: Any, kind: type[PagedLLMError], message: str) -> None:
    """The class decides whether a caller tries again, asks for a key, or shortens its prompt."""
    _, engine = make(lambda exchange: exchange.json(body, status, X_Request_Id="r-1"))
    with pytest.raises(kind, match=message) as caught:
        ask(engine, chat())
    assert type(caught.value) is kind
    assert caught.value.response.status_code == status  # type: ignore[attr-defined]
    assert caught.value.request_id == "r-1"  # type: ignore[attr-defined]


@WAYS
def test_lost_connection(make: Any, ask: Ways) -> None:
    """An answer that breaks off must not look like a short one; and it is not asked for twice."""

    def break_off(exchange: Exchange) -> None:
        if exchange.body.get("stream"):
            exchange.begin_events()
            exchange.event(chat_event("Hel"))
        exchange.hang_up()

    server, engine = make(break_off)
    with pytest.raises(ConnectionFailedError, match="lost before the answer was complete"):
        ask(engine, chat())
    assert len(server.exchanges) == 1


@pytest.mark.parametrize("ask", [stream, astream])
def test_stream_without_an_end(make: Any, ask: Ways) -> None:
    def stop_short(exchange: Exchange) -> None:
        exchange.begin_events()
        exchange.event(chat_event("Hel"))
        exchange.end_events()

    _, engine = make(stop_short)
    with pytest.raises(EngineError, match="ended before its answer did"):
        ask(engine, chat())


@pytest.mark.parametrize("ask", [stream, astream])
@pytest.mark.parametrize(
    ("event", "message"),
    [("{", "no JSON"), ({"error": {"message": "engine died", "code": "engine_dead"}}, "engine died"), ("[1]", "500")],
)
def test_error_in_mid_stream(make: Any, ask: Ways, event: Any, message: str) -> None:
    def fail(exchange: Exchange) -> None:
        exchange.begin_events()
        exchange.event(chat_event("Hel"))
        exchange.event(event)
        exchange.end_events()

    _, engine = make(fail)
    with pytest.raises(EngineError, match=message):
        ask(engine, chat())


@pytest.mark.parametrize("ask", [stream, astream])
def test_answer_that_is_no_stream(make: Any, ask: Ways) -> None:
    _, engine = make(lambda exchange: exchange.json(ANSWER))
    with pytest.raises(EngineError, match="did not answer with a stream"):
        ask(engine, chat())


@pytest.mark.parametrize("ask", [generate, agenerate])
@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"message": {}}], "usage": {}}, [1], "x"])
def test_answer_that_is_none(make: Any, ask: Ways, body: Any) -> None:
    _, engine = make(lambda exchange: exchange.json(body))
    with pytest.raises(EngineError):
        ask(engine, chat())


@WAYS
def test_silent_server(make: Any, ask: Ways) -> None:
    """Who waits for a server that says nothing waits for ever."""
    gone: list[bool] = []
    server, engine = make(lambda exchange: gone.append(exchange.wait_for_hang_up()), read_timeout_s=0.2)
    with pytest.raises(ResponseTimeoutError):
        ask(engine, chat())
    until(lambda: gone == [True])
    assert len(server.exchanges) == 1


@pytest.mark.parametrize("ask", [stream, astream])
def test_stream_that_falls_silent(make: Any, ask: Ways) -> None:
    """The gap between events has a limit of its own: the first may take as long as the queue is."""
    gone: list[bool] = []

    def fall_silent(exchange: Exchange) -> None:
        time.sleep(0.6)
        exchange.begin_events()
        exchange.event(chat_event("Hel"))
        gone.append(exchange.wait_for_hang_up())

    _, engine = make(fall_silent, read_timeout_s=20.0, stream_idle_timeout_s=0.3)
    with pytest.raises(ResponseTimeoutError):
        ask(engine, chat())
    until(lambda: gone == [True])


# --- Secrets and names ---


def test_key_is_sent_and_never_shown(make: Any) -> None:
    server, engine = make(lambda exchange: exchange.json({"error": {"message": "bad key"}}, 401), api_key="sk-secret")
    with pytest.raises(AuthenticationError) as caught:
        generate(engine, chat())
    assert server.exchanges[0].headers["Authorization"] == "Bearer sk-secret"
    shown = f"{caught.value!r} {caught.value.response!r} {caught.value.response.request.headers!r} {engine.config!r}"  # type: ignore[attr-defined]
    assert "sk-secret" not in shown


@WAYS
def test_model_is_asked_for_once(make: Any, ask: Ways) -> None:
    """A client of a server with one model need not know its name."""
    server, engine = make(answer, model=None)
    server.scripts["/v1/models"] = lambda exchange: exchange.json({"data": [{"id": "served", "max_model_len": 99}]})
    assert engine.served_model is None
    assert ask(engine, chat()) == ask(engine, chat()) == "Hello!"
    assert [exchange.path for exchange in server.exchanges] == ["/v1/models", CHAT, CHAT]
    assert server.exchanges[1].body["model"] == engine.served_model == "served"
    assert engine.model_info().max_model_len == 99


def test_endpoints_that_a_server_does_not_have(make: Any) -> None:
    _, engine = make(answer)
    for call in (engine.stats, engine.reset_prefix_cache, lambda: engine.match_prefix(chat())):
        with pytest.raises(EngineError, match="does not offer /v1/cache/"):
            call()
    with pytest.raises(EngineError, match="does not offer /tokenize"):
        engine.tokenize("x")
