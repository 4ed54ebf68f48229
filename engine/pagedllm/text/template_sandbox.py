"""A sandbox for chat templates, with bounds on what rendering one may take.

A template is a program that comes with a model. It sees plain data, changes nothing outside itself, and is stopped
after a number of steps and of characters. What it keeps in variables without writing it (a text doubled again and
again, a huge width given to a padding filter) is bounded by these steps only, not in bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["TemplateLimitError", "TemplateRefusalError", "compile_template", "render_template"]

# Loop rounds and calls of one rendering; the largest templates take some hundred for a message. Seconds at worst.
MAX_STEPS = 2_000_000
# Characters of one rendering: more than the longest context of any model holds.
MAX_CHARACTERS = 1 << 26
# Of a text, a list or an exponent that the template makes by multiplication.
_MAX_PRODUCT = 1 << 20

# Names that no template can write, so that it can neither call the one nor replace the other.
_COUNT_FILTER = " count"
_BUDGET = " budget"


class TemplateRefusalError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class TemplateLimitError(jinja2.TemplateError):
    """The template asks for more than a rendering may take."""


class _Budget:
    """The steps that are left to one rendering."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def spend(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")


class _Environment(ImmutableSandboxedEnvironment):
    """Counts calls; loops count themselves, see ``compile_template``."""

    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Mangled names, as in the base class: a template's keyword arguments may have any other.
        __context.parent[_BUDGET].spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            is_huge = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_PRODUCT
        else:
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            is_huge = hasattr(sized, "__len__") and isinstance(times, int) and len(sized) * times > _MAX_PRODUCT
        if is_huge:
            raise TemplateLimitError(f"{operator} makes a value of more than {_MAX_PRODUCT} items or bits")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model is trained on; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """Jinja's, without names that Python gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may have an attribute called self
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template, once.

    Raises:
        jinja2.TemplateError: It is not Jinja, or uses what there is not.
    """
    environment = _environment()
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, _COUNT_FILTER, [], [], None, None, lineno=loop.lineno)
    tree.set_environment(environment)
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def render_template(template: jinja2.Template, variables: Mapping[str, Any], *, now: datetime) -> str:
    """Render a chat template.

    Args:
        template: From ``compile_template``.
        variables: What the template sees; plain data, which it cannot change.
        now: The time that the template is told.

    Raises:
        TemplateLimitError: It takes too many steps or writes too much.
        Exception: Of many kinds; the template is somebody else's program.
    """
    pieces, num_characters = [], 0
    for piece in template.generate({**variables, "strftime_now": now.strftime, _BUDGET: _Budget()}):
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise TemplateLimitError(f"it writes more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


@functools.lru_cache(maxsize=1)
def _environment() -> _Environment:
    # Blocks are trimmed because templates are written for transformers, which does so.
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters[_COUNT_FILTER] = _counted
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _TemplateNamespace
    # Makes any amount of text of nothing.
    del environment.globals["lipsum"]
    return environment


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = context.parent[_BUDGET]
    for item in items:
        budget.spend()
        yield item


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusalError(str(message))


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have an attribute called {name!r}: unsafe")
