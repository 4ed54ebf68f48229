"""JSON text that may come from anybody, read with bounds."""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import InvalidRequestError

__all__ = ["dump_json", "parse_json"]

# More digits than any number of ours has, and far fewer than make arithmetic on it slow.
_MAX_DIGITS = 40
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def parse_json(text: bytes) -> Any:
    """The value that the text stands for.

    Raises:
        InvalidRequestError: It is no JSON, is nested too deeply, or has what JSON or Unicode do not: NaN, infinities,
            lone surrogates, numbers beyond reason.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_read_int, parse_float=_read_float)
        if _SURROGATE.search(text):  # pairs are fine, and only these escapes can make lone ones
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the body holds a lone surrogate, which is no character") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError("the body is not UTF-8") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequestError(f"the body is not valid JSON{place}") from error
    return value


def dump_json(value: Any) -> bytes:
    """Compact UTF-8. Lone surrogates and non-finite numbers never get here: requests and engine exclude them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def _refuse_constant(name: str) -> Any:
    raise InvalidRequestError(f"the body holds {name}, which is not JSON")


def _read_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise InvalidRequestError(f"the body holds a number of {len(digits)} digits")
    return int(digits)


def _read_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise InvalidRequestError("the body holds a number that is too large")
    return value
