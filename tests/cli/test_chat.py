"""The chat, with a scripted engine and in a real terminal."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModel
from fake_engine import FakeEngine
from tiny_models import write_hf_llama

from pagedllm.api import SamplingParams
from pagedllm.cli.chat import Chat

_spec = importlib.util.spec_from_file_location("terminal", Path(__file__).with_name("terminal.py"))
assert _spec is not None
assert _spec.loader is not None
terminal: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(terminal)


def talk(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, *lines: str, system: str | None = None) -> None:
    """Let a chat read these lines, then the end of its input."""
    left = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    Chat(engine, SamplingParams(max_tokens=20), system).run()


def contents(engine: FakeEngine) -> list[list[tuple[str, str]]]:
    return [[(message.role, message.content) for message in request.messages or ()] for request in engine.requests]


def test_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    talk(monkeypatch, engine, "one", "", "two", system="be brief")
    first, second = contents(engine)
    assert first == [("system", "be brief"), ("user", "one")]
    assert second[:2] == first
    assert [role for role, _ in second[2:]] == ["assistant", "user"]
    assert second[2][1] in capsys.readouterr().out


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    talk(monkeypatch, engine, "one", "/stats", "/reset", "two", "/system new", "three", "/system", "four", "/help")
    assert contents(engine)[1:] == [[("user", "two")], [("system", "new"), ("user", "three")], [("user", "four")]]
    out = capsys.readouterr().out
    assert "last answer: " in out
    assert "/stats" in out


def test_exit_ends_and_an_unknown_command_is_no_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    talk(monkeypatch, engine, "/rest", "/exit", "one")
    assert engine.requests == []
    assert "unknown command /rest" in capsys.readouterr().err


def test_a_refused_question_leaves_the_conversation_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is too long would make every later one too long as well."""
    engine = FakeEngine(max_model_len=300)
    talk(monkeypatch, engine, "x" * 1000, "one")
    assert contents(engine)[-1] == [("user", "one")]
    assert capsys.readouterr().err.startswith("Error: ")


def test_control_characters_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: TinyModel
) -> None:
    """The tiny model's answers are full of them."""
    with tiny_model.engine() as engine:
        sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        lines = iter(["hello", "/exit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        Chat(engine, sampling).run()
    out = capsys.readouterr().out
    assert len(out) > 100
    assert not [char for char in out if ord(char) < 32 and char not in "\n\t"]


def test_lines_from_a_pipe(tiny_model: TinyModel, run_cli: Callable[..., Any]) -> None:
    result = run_cli("chat", "--model", tiny_model.path, "--max-tokens", 3, "--seed", 1, input="one\n/stats\n")
    assert result.exit_code == 0
    assert "3 completion tokens" in result.stdout
    assert "> " not in result.stdout


def test_a_model_without_chat_template(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    write_hf_llama(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    result = run_cli("chat", "--model", tmp_path)
    assert result.exit_code == 1
    assert "has no chat template" in result.stderr


def test_in_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C that ends the program, or does not end the answer; Ctrl-D that does not end the program."""
    write_hf_llama(tmp_path, max_position_embeddings=16_384)
    options = ("--model", str(tmp_path), "--dtype", "float32", "--temperature", "0")
    with terminal.Terminal("-c", "from pagedllm.cli import run; run()", "chat", *options) as screen:
        screen.wait_for("> ")
        screen.type("hello\n")
        screen.wait_for("hello\r\n")
        screen.wait_for("e")  # some of the answer, which would take half a minute
        screen.type("\x03")
        screen.wait_for("[stopped]")
        screen.wait_for("> ")
        screen.type("/stats\n")
        stats = screen.wait_for("> ")
        assert "KV cache: " in stats
        assert " 0 in use" in stats
        screen.type("half a line")
        screen.wait_for("half a line")
        time.sleep(0.2)  # until it waits for a key: a signal just before that is noticed only at the next key
        screen.type("\x03")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.wait_for_end() == 0
