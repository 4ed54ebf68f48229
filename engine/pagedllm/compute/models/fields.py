"""Typed access to the fields of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ModelFileError, UnsupportedModelError

__all__ = ["Fields"]


class Fields:
    """Typed access to a mapping, with errors that name its source and the field. A null reads as a missing field.

    Args:
        where: The mapping's source.
        values: The mapping.
        prefix: Of all keys.
    """

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(self._prefix + key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """Whether the field is there and says null."""
        return self._prefix + key in self._values and self._values[self._prefix + key] is None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, limit: int = 2**31 - 1) -> int:
        """A number in ``[least, limit]``."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= limit:
            raise self.wrong(key, value, f"a whole number from {least} to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def refuse_unless(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse a field whose value is none of those allowed.

        Raises:
            UnsupportedModelError: Naming field and value.
        """
        for key, values in allowed.items():
            value = self.get(key)
            if value is not None and value not in values:
                raise self.unsupported(key)

    def unsupported(self, key: str, supported: str = "") -> UnsupportedModelError:
        """The error that refuses a field's value."""
        note = f"; {supported}" if supported else ""
        return UnsupportedModelError(f"{self.where}: {self._prefix}{key}={self.get(key)!r} is not supported{note}")

    def wrong(self, key: str, value: Any, expected: str) -> ModelFileError:
        """The error of a value that makes no sense."""
        found = "missing" if value is None else repr(value)
        return ModelFileError(f"{self.where}: {self._prefix}{key} is {found}; {expected} is expected")
