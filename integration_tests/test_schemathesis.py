"""Bodies made from the served OpenAPI description, right and wrong ones, for two minutes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis

pytestmark = [pytest.mark.slow, pytest.mark.model]

SECONDS = float(os.environ.get("SCHEMATHESIS_SECONDS", "120"))


@pytest.mark.filterwarnings("ignore")  # of the tool itself
def test_no_fault_of_ours(serve: Callable[..., Any]) -> None:
    """No body whatever may end in an error of the server; only 'not now' is allowed of those."""
    server = serve("--max-num-seqs", "8", "--max-model-len", "256", "--max-choices", "8")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + SECONDS
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        rounds = 0
        while time.monotonic() < deadline:
            rounds += 1
            for result in schema.get_all_operations():
                _probe(result.ok(), client, seen, seed=rounds, deadline=deadline)
        stats = client.get("/v1/cache/stats").json()
    print(dict(seen))
    assert not [key for key in seen if key.startswith("5") and not key.startswith("503")]
    assert any(key.startswith("200 POST /v1/chat") for key in seen)
    assert any(key.startswith("400 POST /v1/completions") for key in seen)
    assert (stats["num_running"], stats["num_referenced_blocks"]) == (0, 0)


def _probe(operation: Any, client: httpx.Client, seen: Counter[str], *, seed: int, deadline: float) -> None:
    modes = schemathesis.GenerationMode
    for mode in (modes.POSITIVE, modes.NEGATIVE) if operation.body else (modes.POSITIVE,):

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=10, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if time.monotonic() > deadline:
                return
            content = b"" if case.body is schemathesis.core.NOT_SET else _encode(case.body)
            response = client.request(
                case.method, case.formatted_path, content=content, headers={"Content-Type": "application/json"}
            )
            seen[f"{response.status_code} {case.method} {operation.path}"] += 1
            assert response.status_code < 500 or response.status_code == 503, response.text

        send()


def _encode(body: Any) -> bytes:
    """Text of a body; wrong ones may be no JSON at all."""
    return body if isinstance(body, bytes) else json.dumps(_short(body), default=repr).encode(errors="surrogatepass")


def _short(body: Any) -> Any:
    """Long answers would leave time for few bodies."""
    if isinstance(body, dict) and isinstance(body.get("max_tokens", 1), (int, type(None))):
        return body | {"max_tokens": min(body.get("max_tokens") or 4, 4)}
    return body
