"""One request, validated when it is built."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from .errors import InvalidRequestError
from .hints import CacheHints
from .message import Message
from .output_format import StructuredOutput, Tool, check_tools
from .sampling_params import SamplingParams, as_tuple

__all__ = ["GenerateRequest"]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One request: exactly one of ``prompt`` (text or token ids) and ``messages`` (a chat).

    Args:
        prompt: Text, encoded with the model's special tokens; or token ids, taken as they are.
        messages: A chat, rendered by the model's chat template.
        sampling: How to choose tokens and when to stop.
        hints: Wishes about KV reuse.
        request_id: Names the request in ``abort`` and in its chunks; unique among those in flight.
        parse_special_tokens: Whether control tokens written in the text (``<|im_end|>``) act as such, or are plain
            text like any other. None: plain in a chat, whose contents come from users and documents and must not
            forge a turn; acting in a text prompt, whose writer does the template's work.
        add_generation_prompt: End a chat with the opening of an assistant's turn.
        continue_final_message: Leave the last message, which is the assistant's, open, so that its exact text is
            continued. Not together with ``add_generation_prompt``.
        structured_output: What the answer must be. Beside tools that the model may call, what it must be where it
            calls none.
        tools: What the model may ask to be called; for messages.
        tool_choice: ``"auto"``, the model decides; ``"none"``, it sees the tools and its answer is text;
            ``"required"``, it calls; or the name of the tool that it calls.
        parallel_tool_calls: Whether it may ask for several calls at once; None: yes, but for one where a call is
            required.

    Raises:
        InvalidRequestError: Naming the fields that do not go together.
    """

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hints: CacheHints = field(default_factory=CacheHints)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    parse_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    structured_output: StructuredOutput | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give exactly one of prompt and messages", param="prompt")
        if self.messages is not None:
            object.__setattr__(self, "messages", as_tuple("messages", self.messages, Message))
        elif not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", as_tuple("prompt", self.prompt, int))
        if not (self.messages or self.prompt):
            param = "prompt" if self.messages is None else "messages"
            raise InvalidRequestError(f"{param} is empty: at least one token is needed to go on from", param=param)
        self._check_text_options()
        self._check_output_format()

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may have calls in it."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return self.calls_tools and self.tool_choice != "auto"

    def _check_output_format(self) -> None:
        tools = check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        object.__setattr__(self, "tools", tools)
        if tools and self.messages is None:
            raise InvalidRequestError("tools are for messages; a prompt has no place for them", param="tools")
        structured = self.structured_output
        if structured is not None and not isinstance(structured, StructuredOutput):
            raise InvalidRequestError.for_value("structured_output", structured, "must be a StructuredOutput")
        if structured is not None and self.must_call:
            raise InvalidRequestError(
                f"tool_choice={self.tool_choice!r} leaves room for calls only, and structured_output is about a text",
                param="tool_choice",
            )
        if structured is None and not self.calls_tools:
            return
        for name, default in (("min_tokens", 0), ("ignore_eos", False)):
            if getattr(self.sampling, name) != default:
                raise InvalidRequestError(
                    f"{name} is not for answers with a structure or with calls: these end where they are complete",
                    param=name,
                )

    def _check_text_options(self) -> None:
        for name in ("parse_special_tokens", "add_generation_prompt", "continue_final_message"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "parse_special_tokens"):
                raise InvalidRequestError.for_value(name, value, "must be True or False")
        if isinstance(self.prompt, tuple) and self.parse_special_tokens is not None:
            raise InvalidRequestError(
                "parse_special_tokens is about text; a prompt of token ids has none", param="parse_special_tokens"
            )
        if self.messages is None:
            for name, default in (("add_generation_prompt", True), ("continue_final_message", False)):
                if getattr(self, name) is not default:
                    raise InvalidRequestError(f"{name} is for messages; a prompt is continued as it is", param=name)
        elif self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message continues the last turn and add_generation_prompt opens a new one: "
                    "set add_generation_prompt to False",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise InvalidRequestError(
                    f"continue_final_message: the last message must be the assistant's, not {self.messages[-1].role!r}",
                    param="continue_final_message",
                )
