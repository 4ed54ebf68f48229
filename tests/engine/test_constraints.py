"""Sampling under grammars: rows that go without a mask get the token that they would have got with one."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import pytest
import torch
from control_helpers import make_sequence

from pagedllm.compute.bitmask import apply_bitmask
from pagedllm.compute.sampler import Sampler
from pagedllm.constraints import Constraints
from pagedllm.files.locate import locate_model
from pagedllm.text.grammar import Grammar, GrammarCompiler, Matcher, fill_bitmask, new_executor
from pagedllm.text.tokenizer import Tokenizer, load_tokenizer
from pagedllm_kernels.reference import ReferenceKernels

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
    {"temperature": 1.0},
    {"temperature": 3.0, "frequency_penalty": 1.0, "logit_bias": {30: 4.0}},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.2},
)
GRAMMARS = (
    "start: /[a-z ]{1,40}/",
    r"start: /(\d{4}-\d{2}-\d{2},? ?)+/",
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2-135m"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> list[Grammar]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    return [compiler.compile(text, param="grammar") for text in GRAMMARS]


class CountingMasks(Constraints):
    """Knows how many rows it has masked."""

    num_masked = 0

    def _mask(self, logits: torch.Tensor, matchers: Any) -> torch.Tensor:
        self.num_masked += len(matchers)
        return super()._mask(logits, matchers)


def allowed_tokens(matchers: List[Matcher]) -> torch.Tensor:
    return torch.from_numpy(fill_bitmask(matchers, new_executor()))


@pytest.mark.parametrize("favour", [0.0, 6.0, 20.0], ids=["any-token", "some-allowed", "mostly-allowed"])
def test_same_tokens_as_with_every_row_masked(favour: float, grammars: list[Grammar], tokenizer: Tokenizer) -> None:
    """Rows of all parameters, with and without a grammar, over models that know the form, or hardly, or not."""
    generator = torch.Generator().manual_seed(0)
    sampler, constraints = Sampler(ReferenceKernels()), CountingMasks()
    rows = [make_sequence([1], **params) for params in PARAMS for _ in range(len(grammars) + 1)]
    own = [*grammars, None] * len(PARAMS)
    matchers = [None if grammar is None else grammar.new_matcher() for grammar in own]
    held = [row for row, grammar in enumerate(own) if grammar is not None]
    num_steps = 8
    for _ in range(num_steps):
        bits = allowed_tokens([matcher for matcher in matchers if matcher is not None])
        logits = 3 * torch.randn(len(rows), tokenizer.vocab_size, generator=generator)
        logits[held] += (
            favour * apply_bitmask(torch.zeros(len(held), tokenizer.vocab_size), bits, range(len(held))).exp()
        )
        wanted = sampler(apply_bitmask(logits, bits, held), rows)
        assert constraints.sample(sampler, logits, rows, matchers) == wanted
        for row in held:
            matcher, grammar = matchers[row], own[row]
            assert matcher is not None
            assert grammar is not None
            assert matcher.allows(wanted[row])
            matcher.accept(wanted[row])
            if matcher.is_complete or wanted[row] in tokenizer.eos_token_ids:
                matchers[row] = grammar.new_matcher()
    assert (constraints.num_masked < 0.7 * num_steps * len(held)) == (favour == 20.0)
