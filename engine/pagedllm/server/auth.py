"""Who asks: API keys, and what belongs to each."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

__all__ = ["ANYBODY", "KEYS_VARIABLE", "KEY_VARIABLE", "ApiKey", "KeyRing", "find_keys", "read_key_file", "read_keys"]

logger = logging.getLogger(__name__)

KEY_VARIABLE = "PAGEDLLM_API_KEY"
KEYS_VARIABLE = "PAGEDLLM_API_KEYS"

_MIN_SECRET_CHARS = 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A tenant.

    Args:
        name: Names it in figures; never the secret.
        secret: What its requests carry.
        is_admin: May reset the cache, set priorities and see the figures of all.
    """

    name: str
    secret: str = field(repr=False)
    is_admin: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError.for_value("api key name", self.name, "must be 1 to 64 letters, digits, '_', '.' or '-'")
        if len(self.secret) < _MIN_SECRET_CHARS or not self.secret.isascii() or not self.secret.isprintable():
            raise ConfigError(
                f"the secret of api key {self.name!r} must be at least {_MIN_SECRET_CHARS} ASCII characters"
            )


ANYBODY = ApiKey(name="anybody", secret="-" * _MIN_SECRET_CHARS, is_admin=True)
"""The one tenant of a server without keys."""


class KeyRing:
    """Finds the key that a request carries, and keeps what tenants say apart.

    Args:
        keys: None at all lets everybody in, as one tenant.
        share_cache: Let tenants share cached prefixes.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), *, share_cache: bool = False) -> None:
        for name, values in (("names", [key.name for key in keys]), ("secrets", [key.secret for key in keys])):
            if len(set(values)) != len(values):
                raise ConfigError(f"api keys: the {name} must differ")
        self.keys = tuple(keys)
        self._digests = [hashlib.sha256(key.secret.encode()).digest() for key in keys]
        self._scopes_salts = bool(keys) and not share_cache
        # The cache dies with the process, and so may this.
        self._pepper = secrets.token_bytes(32)

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key of an ``Authorization`` header, or None. Takes the same time whichever key is meant."""
        if not self.keys:
            return ANYBODY
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode()).digest()
        found = None
        for key, expected in zip(self.keys, self._digests, strict=True):
            if hmac.compare_digest(digest, expected):
                found = key
        return found if scheme.lower() == "bearer" else None

    def salt_of(self, key: ApiKey, client_salt: str | None) -> str | None:
        """What separates this tenant's cached prefixes, under each salt of its own, from all others'."""
        return self.scoped(key, "salt", client_salt) if self._scopes_salts else client_salt

    def scoped(self, key: ApiKey, kind: str, value: str | None) -> str:
        """A name that no other tenant can give."""
        text = "\0".join((kind, key.name, "none" if value is None else f"given {value}"))
        return hmac.new(self._pepper, text.encode(), hashlib.sha256).hexdigest()


def read_keys(text: str, source: str) -> list[ApiKey]:
    """Keys from lines, or entries parted by ``;``, of the form ``name secret [admin]``; ``#`` begins a comment line.

    Raises:
        ConfigError: Naming the source and the line, not its content.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(re.split(r"[\n;]", text), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3) or words[2:] not in ([], ["admin"]):
            raise ConfigError(f"{source}, line {number}: must be 'name secret' or 'name secret admin'")
        keys.append(ApiKey(name=words[0], secret=words[1], is_admin=len(words) == 3))
    if not keys:
        raise ConfigError(f"{source} holds no api key")
    return keys


def read_key_file(path: Path) -> list[ApiKey]:
    """Keys of a file; one that others may read is used with a warning."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the api key file {str(path)!r} cannot be read: {error}") from error
    if os.name == "posix" and mode & 0o077:
        logger.warning("the api key file %s may be read by others: chmod 600 it", path)
    return read_keys(text, str(path))


def find_keys(path: Path | None = None) -> list[ApiKey]:
    """The keys of a file and of the environment, which has many in one variable or the secret of one admin in another.

    Raises:
        ConfigError: A line is wrong.
    """
    keys = [] if path is None else read_key_file(path)
    if os.environ.get(KEYS_VARIABLE):
        keys += read_keys(os.environ[KEYS_VARIABLE], KEYS_VARIABLE)
    if os.environ.get(KEY_VARIABLE):
        keys.append(ApiKey(name="default", secret=os.environ[KEY_VARIABLE], is_admin=True))
    return keys
