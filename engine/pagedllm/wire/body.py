"""A JSON object whose fields are taken one by one, so that none is overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequestError

__all__ = ["Body"]

_KINDS = {str: "a string", bool: "true or false", int: "a whole number", list: "a list", dict: "an object"}


class Body:
    """Fields of one JSON object. Null means what absence means.

    Args:
        value: The object.
        name: How errors name it; empty for a request's body itself.

    Raises:
        InvalidRequestError: It is no object.
    """

    def __init__(self, value: Any, name: str = "") -> None:
        if not isinstance(value, Mapping):
            allowed = "must be a JSON object"
            raise (
                InvalidRequestError.for_value(name, value, allowed)
                if name
                else InvalidRequestError(f"the body {allowed}")
            )
        self._fields = dict(value)
        self._name = name

    def __contains__(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def has_null(self, field: str) -> bool:
        """Whether the field is there and says null, where that differs from absence."""
        return field in self._fields and self._fields[field] is None

    def take(self, field: str) -> Any:
        """The field's value, whatever it is; None if it is absent."""
        return self._fields.pop(field, None)

    def take_as(self, kind: type, field: str, default: Any = None) -> Any:
        """The field's value, checked to be of one JSON type."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequestError.for_value(self.path(field), value, f"must be {_KINDS[kind]}")
        return value

    def take_neutral(self, field: str, *neutral: Any) -> None:
        """Take a field that we do not support, unless its value asks for nothing.

        Raises:
            InvalidRequestError: It asks for something.
        """
        value = self.take(field)
        if value is None or value in ([], {}) or any(value == item and type(value) is type(item) for item in neutral):
            return
        path = self.path(field)
        raise InvalidRequestError.for_value(path, value, "is not supported here")

    def close(self, *, harmless: tuple[str, ...] = ()) -> None:
        """Check that nothing is left.

        Args:
            harmless: Fields that may be there and change nothing; the documentation lists them.

        Raises:
            InvalidRequestError: Naming a field that is unknown.
        """
        unknown = sorted(str(field) for field in self._fields if field not in harmless)
        if unknown:
            path = self.path(unknown[0])
            raise InvalidRequestError(f"unknown field {path!r}"[:200], param=path[:100])

    def path(self, field: str) -> str:
        return f"{self._name}.{field}" if self._name else field
