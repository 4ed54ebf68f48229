"""``pagedllm chat``: a small chat in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from ..api import Chunk, Engine, GenerateRequest, Message, SamplingParams
from ..config import EngineConfig
from ..errors import EngineError, InvalidRequestError, PagedLLMError
from .engines import open_engine
from .errors import one_line
from .options import with_engine_options

with contextlib.suppress(ImportError):  # not on every platform
    import readline  # noqa: F401  gives input() line editing and history

__all__ = ["Chat", "chat"]

_HELP = """\
/stats        what the last answer took, and the state of the cache
/reset        forget the conversation
/system TEXT  start anew with this system prompt; without TEXT: without one
/help         this list
/exit         end; also Ctrl-D. Ctrl-C stops an answer."""
# Control characters could move the cursor or change the terminal; a model has no business to.
_UNPRINTABLE = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@with_engine_options
def chat(
    config: EngineConfig,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: what the model's makers recommend, else 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one answer; default: the rest of the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
) -> None:
    """Chat with a model in the terminal. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends."""
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    typer.echo(f"Loading {config.model} …", err=True)
    with open_engine(config) as engine:
        info = engine.model_info()
        if not info.has_chat_template:
            raise InvalidRequestError(f"{info.model} has no chat template: choose a model made for chats")
        typer.echo(f"{info.architecture}, {info.dtype}, context {info.max_model_len} tokens. /help for help.", err=True)
        Chat(engine, sampling, system).run()


class Chat:
    """The conversation and its commands.

    Args:
        engine: Answers; not closed here.
        sampling: Of every answer.
        system: System prompt.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._system = system
        self._turns: list[Message] = []
        self._last: Chunk | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._show_stats,
            "/reset": self._reset,
            "/system": self._set_system,
            "/help": lambda _: typer.echo(_HELP),
        }

    def run(self) -> None:
        """Read and answer until the input ends."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
                if line == "/exit":
                    return
                self._handle(line)
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:  # at the prompt, or a second one while the first is dealt with
                typer.echo()

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            name, _, argument = line.partition(" ")
            command = self._commands.get(name)
            if command is None:
                typer.echo(f"unknown command {name}; /help lists them", err=True)
            else:
                command(argument.strip())
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream an answer. What was seen of a stopped one stays in the conversation; a refused question does not."""
        user = Message(role="user", content=line)
        system = [Message(role="system", content=self._system)] if self._system else []
        request = GenerateRequest(messages=(*system, *self._turns, user), sampling=self._sampling)
        pieces: list[str] = []
        try:
            stream = self._engine.stream(request)
            try:
                for chunk in stream:
                    pieces.append(chunk.text)
                    typer.echo(chunk.text.translate(_UNPRINTABLE), nl=False)
                    self._last = chunk
                typer.echo()
            except KeyboardInterrupt:
                typer.echo(" [stopped]")
            finally:
                stream.close()
        except EngineError:
            raise  # nothing that follows could work
        except PagedLLMError as error:
            typer.echo(f"Error: {one_line(error)}", err=True)
        if any(pieces):
            self._turns += [user, Message(role="assistant", content="".join(pieces))]

    def _show_stats(self, _: str) -> None:
        last = self._last
        if last is not None and last.usage is not None and last.timings is not None:
            usage, timings = last.usage, last.timings
            line = f"last answer: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from the cache), "
            line += f"{usage.completion_tokens} completion tokens; {timings.ttft_s * 1000:.0f} ms to the first token"
            if usage.completion_tokens > 1:
                rate = (usage.completion_tokens - 1) / max(timings.total_s - timings.ttft_s, 1e-9)
                line += f", then {rate:.1f} tokens/s"
            typer.echo(line)
        stats = self._engine.stats()
        hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        typer.echo(
            f"KV cache: {stats.num_blocks} blocks, {stats.num_referenced_blocks} in use, {stats.num_cached_blocks} "
            f"kept for reuse; {hits:.0%} of all prompt tokens came from it"
        )
        typer.echo(f"engine: {stats.num_steps} steps, {stats.num_generated_tokens} tokens generated")

    def _reset(self, _: str) -> None:
        self._turns.clear()
        typer.echo("The conversation is forgotten.")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._turns.clear()
        typer.echo("A new conversation with this system prompt." if text else "A new conversation, no system prompt.")
