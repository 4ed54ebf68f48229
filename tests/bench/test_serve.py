"""``pagedllm bench serve``: its prompts share what they say, and its figures are those of what happened."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from scripted_server import Exchange, ScriptedServer
from served_engine import served
from typer.testing import CliRunner

from pagedllm.bench.datasets import Shape, make_prompts
from pagedllm.bench.serving import Answer, ServingRun, arrival_times
from pagedllm.bench.serving_report import parse_goals, serving_figures
from pagedllm.cli.main import app
from pagedllm.errors import ConfigError

VOCAB = 1000
SHAPE = Shape(input_len=32, output_len=8, prefix_len=40, suffix_len=8, num_prefixes=3, document_len=16)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    for name in ("PAGEDLLM_BASE_URL", "PAGEDLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


@pytest.fixture
def url() -> Iterator[str]:
    with served(FakeEngine()) as url:
        yield url


def prompts_of(dataset: str, count: int = 30, seed: int = 0) -> list[Any]:
    return [item.content for item in make_prompts(dataset, count, SHAPE, vocab_size=VOCAB, seed=seed)]


@pytest.mark.parametrize("dataset", ["random", "prefix_repetition", "rag"])
def test_prompts_are_drawn_by_seed(dataset: str) -> None:
    """Two runs that differ only in what they sent cannot be compared."""
    assert prompts_of(dataset) == prompts_of(dataset)
    assert prompts_of(dataset) != prompts_of(dataset, seed=1)
    assert {token for prompt in prompts_of(dataset) for token in prompt} <= set(range(VOCAB // 10, VOCAB))


def test_what_prompts_share() -> None:
    assert len({prompt[0:16] for prompt in prompts_of("random")}) == 30
    repeated = prompts_of("prefix_repetition")
    prefixes = [prompt[:40] for prompt in repeated]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10, 10, 10]
    assert len(set(repeated)) == 30
    rag = prompts_of("rag")
    assert len({prompt[:48] for prompt in rag}) == 1
    assert {len(prompt) for prompt in rag} == {48 + 4 * 16 + 24}
    # Popular documents stand first in the corpus, so that many prompts go on alike.
    assert len({prompt[:64] for prompt in rag}) < 15


def test_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = ('{"prompt": "Hello", "max_tokens": 3}', "", '{"messages": [{"role": "user", "content": "Hi"}]}')
    file.write_text("\n".join([*lines, '{"prompt": [5, 6]}']))
    first, second, third, again = make_prompts(str(file), 4, SHAPE, vocab_size=VOCAB, seed=0)
    assert (first.content, first.num_output_tokens, first.is_chat) == ("Hello", 3, False)
    assert (second.is_chat, second.num_output_tokens) == (True, 8)
    assert (third.content, again) == ((5, 6), first)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1 .* is not JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": "x", "stop": "y"}', "must be an object"),
        ('{"max_tokens": 3}', "must have one of prompt and messages"),
        ('{"prompt": ""}', "prompt must be a text"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"messages": []}', "messages must be a list"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_prompts(str(file), 2, SHAPE, vocab_size=VOCAB, seed=0)
    with pytest.raises(ConfigError, match="cannot read"):
        make_prompts(str(tmp_path / "none.jsonl"), 2, SHAPE, vocab_size=VOCAB, seed=0)
    with pytest.raises(ConfigError, match="dataset='sharegpt'"):
        make_prompts("sharegpt", 2, SHAPE, vocab_size=VOCAB, seed=0)


def test_arrivals() -> None:
    """Requests at a steady beat never queue as real ones do."""
    times = arrival_times(4000, 10.0, seed=3)
    assert times[0] == 0
    assert times == sorted(times) == arrival_times(4000, 10.0, seed=3)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    # Of an exponential distribution mean and deviation are equal.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)
    assert arrival_times(3, math.inf, seed=0) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 5.0, seed=0) == []
    with pytest.raises(ConfigError, match="request_rate=0"):
        arrival_times(3, 0, seed=0)


def test_figures_of_a_known_run() -> None:
    """Each figure by hand: a wrong definition is otherwise never noticed."""
    answers = [
        Answer(sent=1.0, arrivals=[1.5, 1.6, 1.8], ended=2.0, num_prompt_tokens=10, num_output_tokens=4),
        Answer(sent=2.0, arrivals=[2.1], ended=2.2, num_prompt_tokens=20, num_output_tokens=1, num_cached_tokens=16),
        Answer(sent=2.0, arrivals=[2.1, 2.2], ended=2.5, error="broke off"),
    ]
    found = serving_figures(ServingRun(answers=answers, duration_s=2.0), {"ttft": 200.0, "tpot": 50.0})
    assert (found["num_completed"], found["num_failed"], found["errors"]) == (2, 1, {"broke off": 1})
    assert (found["num_prompt_tokens"], found["num_output_tokens"], found["num_cached_tokens"]) == (30, 5, 16)
    assert found["requests_per_second"] == 1.0
    assert found["output_tokens_per_second"] == 2.5
    assert found["total_tokens_per_second"] == 17.5
    assert found["ttft_ms"]["mean"] == pytest.approx(300)
    assert found["ttft_ms"]["median"] == pytest.approx(300)
    assert found["e2e_ms"]["mean"] == pytest.approx(450)
    assert found["itl_ms"]["mean"] == pytest.approx(150)
    assert found["tpot_ms"]["mean"] == pytest.approx(100)
    assert (found["num_good"], found["goodput_requests_per_second"]) == (1, 0.5)


def test_goals() -> None:
    assert parse_goals(["ttft:500 tpot:50", "e2el:3000,itl:1.5"]) == {"ttft": 500, "tpot": 50, "e2el": 3000, "itl": 1.5}
    for wrong in ("ttft", "ttft:x", "speed:3", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="goodput="):
            parse_goals([wrong])


@pytest.mark.parametrize("dataset", ["random", "prefix_repetition", "rag"])
def test_run(bench: Any, url: str, tmp_path: Path, dataset: str) -> None:
    file, plot = tmp_path / "f.json", tmp_path / "f.svg"
    sizes = ("--num-prompts", 12, "--input-len", 20, "--output-len", 5, "--prefix-len", 32, "--document-len", 16)
    goals = ("--goodput", "ttft:60000 e2el:60000", "--request-rate", 200, "--max-concurrency", 3)
    result = bench("--base-url", url, "--dataset", dataset, *sizes, *goals, "--json", file, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "12 answers, 0 failed" in result.stdout
    found = json.loads(file.read_text())
    assert (found["num_completed"], found["num_output_tokens"], found["num_good"]) == (12, 60, 12)
    assert (found["model"], found["dataset"], found["max_concurrency"]) == ("fake", dataset, 3)
    assert (found["num_cached_tokens"] > 0) is (dataset != "random")
    assert found["ttft_ms"]["median"] <= found["e2e_ms"]["median"]
    assert set(found["itl_ms"]) == {"mean", "median", "p95", "p99"}
    assert "api_key" not in found
    assert plot.read_text().startswith("<?xml")


def test_chats_of_a_file(bench: Any, url: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}\n')
    result = bench("--base-url", url, "--dataset", file, "--num-prompts", 3)
    assert result.exit_code == 0, result.output
    assert "21 output tokens" in result.stdout


def test_another_server(bench: Any, tmp_path: Path) -> None:
    """A server that knows only OpenAI's fields, and fails at times: failures are told and count in no figure."""
    num_asked = 0

    def complete(exchange: Exchange) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:
            return exchange.json({"error": {"message": "overheated"}}, 500)
        exchange.begin_events()
        for text in ("a", "b", ""):
            exchange.event({"choices": [{"index": 0, "text": text, "finish_reason": None if text else "length"}]})
            time.sleep(0.002)
        if num_asked == 4:
            return exchange.end_events()
        exchange.event("[DONE]")
        return exchange.end_events()

    scripts: Any = {"/v1/completions": complete, "/v1/models": lambda ex: ex.json({"data": [{"id": "m"}]})}
    file = tmp_path / "f.json"
    with ScriptedServer(scripts) as server:
        result = bench("--base-url", server.url, "--num-prompts", 5, "--max-concurrency", 1, "--json", file)
    assert result.exit_code == 1
    found = json.loads(file.read_text())
    assert (found["num_completed"], found["num_failed"], found["num_output_tokens"]) == (3, 2, 6)
    assert any("overheated" in error for error in found["errors"])
    assert any("ended before its end" in error for error in found["errors"])
    assert "overheated" in result.stdout
    assert (found["vocab_size"], found["model"]) == (32000, "m")


def test_what_cannot_be_measured_is_one_clear_line(bench: Any, url: str) -> None:
    cases: list[tuple[tuple[Any, ...], int, str]] = [
        ((), 2, "give --base-url or set PAGEDLLM_BASE_URL"),
        (("--base-url", "http://127.0.0.1:9/v1"), 1, "cannot ask http://127.0.0.1:9/v1 for its models"),
        (("--base-url", url, "--model", "other"), 1, "the server has no model other; it has fake"),
        (("--base-url", url, "--request-rate", -1), 2, "request_rate=-1"),
        (("--base-url", url, "--goodput", "x:1"), 2, "goodput='x:1'"),
        (("--base-url", url, "--input-len", 9000), 1, "does not answer the first request"),
        (("--base-url", url, "--dataset", "rag", "--documents-per-prompt", 99), 2, "documents_per_prompt=99"),
    ]
    for arguments, status, message in cases:
        result = bench(*arguments)
        assert (result.exit_code, message in result.stderr) == (status, True), result.output
        assert "Traceback" not in result.output
