"""Every error that the engine raises on purpose.

::

    PagedLLMError
    ├── InvalidRequestError (ValueError)     one request is wrong: names the parameter, the value, what is allowed
    │   └── ContextLengthError               prompt, or prompt + max_tokens, does not fit max_model_len or the KV pool
    ├── ConfigError (ValueError)             an engine option is wrong or cannot be met on this machine
    ├── ModelLoadError                       the model cannot be used
    │   ├── ModelNotFoundError               nothing there: says what was tried and what to install
    │   ├── ModelFileError                   a file is damaged or incomplete
    │   └── UnsupportedModelError            architecture, quantisation or tokenizer that we do not implement
    ├── MissingDependencyError (ImportError) an optional package is needed: says which extra to install
    ├── AccessError                          a server does not let us in
    │   ├── AuthenticationError              it does not know the key, or needs one
    │   └── PermissionDeniedError            the key may not do this
    └── EngineError                          the engine itself, not the request
        ├── OverloadedError                  too busy now; the same request may succeed later
        │   ├── QueueFullError               max_num_queued_reqs are waiting already
        │   ├── QueueTimeoutError            it waited longer than queue_timeout_s
        │   └── RateLimitError               a server takes no more requests from this client now
        ├── ConnectionFailedError            a server cannot be reached, or the connection was lost in mid-answer
        ├── ResponseTimeoutError             a server was silent for too long
        ├── EngineClosedError                used after close()
        ├── EngineDeadError                  its worker died; __cause__ is the reason
        └── ForkedProcessError               used in a child process after fork()
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessError",
    "AuthenticationError",
    "ConfigError",
    "ConnectionFailedError",
    "ContextLengthError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineError",
    "ForkedProcessError",
    "InvalidRequestError",
    "MissingDependencyError",
    "ModelFileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "OverloadedError",
    "PagedLLMError",
    "PermissionDeniedError",
    "QueueFullError",
    "QueueTimeoutError",
    "RateLimitError",
    "ResponseTimeoutError",
    "UnsupportedModelError",
]


class PagedLLMError(Exception):
    """Base of all errors raised by pagedllm."""


class InvalidRequestError(PagedLLMError, ValueError):
    """One request is wrong; nothing else is affected.

    Attributes:
        param: Name of the offending field, or None when it is the request as a whole.
        code: Short machine-readable reason, as OpenAI's error body carries it.
    """

    code: str = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def for_value(cls, param: str, value: Any, allowed: str) -> InvalidRequestError:
        """The usual form: ``top_p=1.5: must be in (0, 1]``."""
        return cls(f"{param}={_short(value)}: {allowed}", param=param)


class ContextLengthError(InvalidRequestError):
    """The prompt, alone or with ``max_tokens``, can never fit."""

    code = "context_length_exceeded"


class ConfigError(PagedLLMError, ValueError):
    """An engine option is wrong, or this machine cannot meet it."""

    @classmethod
    def for_value(cls, option: str, value: Any, allowed: str) -> ConfigError:
        return cls(f"{option}={_short(value)}: {allowed}")


class ModelLoadError(PagedLLMError):
    """The model cannot be used."""


class ModelNotFoundError(ModelLoadError):
    """No model at that name or path."""


class ModelFileError(ModelLoadError):
    """A model file is damaged or incomplete."""


class UnsupportedModelError(ModelLoadError):
    """A model that we do not implement."""


class MissingDependencyError(PagedLLMError, ImportError):
    """An optional package is not installed."""


class AccessError(PagedLLMError):
    """A server does not let us in."""


class AuthenticationError(AccessError):
    """The server does not know the API key, or needs one."""


class PermissionDeniedError(AccessError):
    """The API key is known, and may not do this."""


class EngineError(PagedLLMError):
    """The engine cannot serve, whatever the request."""


class OverloadedError(EngineError):
    """The engine is too busy now; the same request may succeed later."""


class QueueFullError(OverloadedError):
    """As many requests as may wait are waiting already."""


class QueueTimeoutError(OverloadedError):
    """The request waited as long as it may without being computed."""


class RateLimitError(OverloadedError):
    """A server takes no more requests from this client now."""


class ConnectionFailedError(EngineError):
    """A server cannot be reached, or the connection to it was lost before the answer was complete."""


class ResponseTimeoutError(EngineError):
    """A server was silent for longer than it may be."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class EngineDeadError(EngineError):
    """The engine's worker died; ``__cause__`` tells why."""


class ForkedProcessError(EngineError):
    """The engine belongs to the parent process."""


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
