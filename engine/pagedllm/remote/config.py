"""Where a server is and how patiently to talk to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from ..errors import ConfigError

__all__ = ["RemoteConfig"]

_MAX_CONNECTIONS = 4096


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """A server and the limits of talking to it. All times are in seconds.

    Args:
        base_url: Where OpenAI's API begins, such as ``http://host:8000/v1``; a URL without a path gets ``/v1``.
        api_key: Sent as a bearer token; never shown.
        model: The name that requests ask for; None: the one that the server names first.
        connect_timeout_s: For a connection to be made.
        read_timeout_s: From sending a request to the beginning of its answer; of an answer that is not streamed, to
            its end.
        stream_idle_timeout_s: Between two pieces of a streamed answer.
        max_retries: How often to send a request again that was certainly not begun: the server could not be reached,
            or was too busy and said when to return.
        max_connections: Most requests under way at once, of all threads together and of each event loop; more wait.

    Raises:
        ConfigError: Naming the option.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 600.0
    stream_idle_timeout_s: float = 120.0
    max_retries: int = 2
    max_connections: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", _checked_url(self.base_url))
        for name in ("api_key", "model"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}: must be a text that is not empty")
        # What HTTP cannot carry would fail in each request, and the failure's message would show the key.
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII characters")
        for name in ("connect_timeout_s", "read_timeout_s", "stream_idle_timeout_s"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise ConfigError.for_value(name, value, "must be a number of seconds above 0")
        for name, least, most in (("max_retries", 0, 100), ("max_connections", 1, _MAX_CONNECTIONS)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError.for_value(name, value, f"must be a whole number from {least} to {most}")

    @property
    def root_url(self) -> str:
        """Where the endpoints are that OpenAI's API does not have: ``base_url`` without its ``/v1``."""
        return self.base_url.removesuffix("/v1")


def _checked_url(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError.for_value("base_url", value, "must be a URL such as http://host:8000/v1")
    try:
        url = urlsplit(value.strip())
        _ = url.port
    except ValueError as error:
        raise ConfigError(f"base_url: not a URL ({error})") from error
    # Before anything that shows the URL.
    if url.username is not None or url.password is not None:
        raise ConfigError("base_url: must not hold a user or password; give the key as api_key")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError.for_value("base_url", value, "must begin with http:// or https:// and a host")
    if url.query or url.fragment:
        raise ConfigError.for_value("base_url", value, "must have no query and no fragment")
    path = url.path.rstrip("/")
    return urlunsplit(SplitResult(url.scheme, url.netloc, path or "/v1", "", ""))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
