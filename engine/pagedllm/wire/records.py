"""Flat dataclasses of ours <-> JSON objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import EngineError

__all__ = ["from_record", "to_record"]

_Record = TypeVar("_Record")


def to_record(value: Any) -> dict[str, Any]:
    """A JSON object of a dataclass's fields."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def from_record(kind: type[_Record], record: Any) -> _Record:
    """The dataclass again. A newer server may say more than we know, and the rest is left aside.

    Raises:
        EngineError: What is needed is missing: this is no answer of such a server.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {field.name for field in fields}
    values = {
        name: _frozen(value) for name, value in (record.items() if isinstance(record, Mapping) else ()) if name in known
    }
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise EngineError(f"the server's answer holds no valid {kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_record(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
