"""Prompts encoded where requests come in, so that the router knows their blocks and no replica encodes them again."""

from __future__ import annotations

from collections.abc import Sequence

from ..api import GenerateRequest, ModelInfo
from ..config import EngineConfig
from ..control.block_hash import block_hashes
from ..files.description import read_generation_defaults
from ..files.locate import locate_model
from ..intake import Intake
from ..text.answer import AnswerForms
from ..text.tokenizer import load_tokenizer
from .messages import Call
from .routing import RouteQuery

__all__ = ["Prompts"]


class Prompts:
    """The model's tokenizer and chat template, without the model. Safe from many threads.

    Args:
        config: The engines'.
        info: What an engine says of its model.

    Raises:
        ModelLoadError: The model's files are not on this machine.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        files = locate_model(config.model)
        self._tokenizer = load_tokenizer(
            files, chat_template=config.chat_template, template_variables=dict(config.chat_template_kwargs)
        )
        forms = AnswerForms(self._tokenizer, info.vocab_size, config)
        self._intake = Intake(self._tokenizer, info, read_generation_defaults(files), forms)
        self._block_size = info.block_size
        self._enable_prefix_caching = config.enable_prefix_caching

    def make_call(self, request: GenerateRequest) -> Call:
        """The request as replicas get it.

        Raises:
            InvalidRequestError: It cannot be encoded.
        """
        token_ids = self.encode(request)
        # Log probabilities of a prompt need all of it computed.
        can_reuse = self._enable_prefix_caching and request.sampling.prompt_logprobs is None
        query = RouteQuery(
            request_id=request.request_id,
            num_tokens=len(token_ids),
            block_size=self._block_size,
            chain=tuple(block_hashes(token_ids, self._block_size, request.hints.salt)) if can_reuse else (),
            affinity=request.hints.prefix_key,
        )
        return Call(
            request=request, query=query, token_ids=None if isinstance(request.prompt, tuple) else tuple(token_ids)
        )

    def encode(self, request: GenerateRequest) -> list[int]:
        """Token ids of the request's prompt, or of its chat as the template renders it."""
        return self._intake.encode_prompt(request)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)
