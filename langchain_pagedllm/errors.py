"""The engine's errors as LangChain knows them: each class here is in both trees, so either may be caught.

::

    engine error                        class here                 and LangChain's
    ─────────────────────────────────   ────────────────────────   ──────────────────────────────────────────────
    InvalidRequestError                 InvalidRequestError        ModelInvalidRequestError
    └── ContextLengthError              ContextLengthError         ContextOverflowError, ModelInvalidRequestError
    ConfigError                         ConfigError                ModelError
    ModelLoadError                      ModelLoadError             ModelError
    ├── ModelNotFoundError              ModelNotFoundError         ModelNotFoundError
    ├── ModelFileError                  ModelFileError             ModelError
    └── UnsupportedModelError           UnsupportedModelError      ModelError
    MissingDependencyError              MissingDependencyError     ModelError
    AccessError                         AccessError                ModelError
    ├── AuthenticationError             AuthenticationError        ModelAuthenticationError
    └── PermissionDeniedError           PermissionDeniedError      ModelPermissionDeniedError
    EngineError                         EngineError                ModelAPIError (retryable)
    ├── OverloadedError                 OverloadedError            ModelAPIError (retryable)
    │   ├── QueueFullError              QueueFullError             ModelAPIError (retryable)
    │   ├── QueueTimeoutError           QueueTimeoutError          ModelAPIError (retryable)
    │   └── RateLimitError              RateLimitError             ModelRateLimitError (retryable)
    ├── ConnectionFailedError           ConnectionFailedError      ModelConnectionError (retryable)
    ├── ResponseTimeoutError            ResponseTimeoutError       ModelTimeoutError (retryable)
    ├── EngineClosedError               EngineClosedError          ModelAPIError (retryable)
    ├── EngineDeadError                 EngineDeadError            ModelAPIError (retryable)
    └── ForkedProcessError              ForkedProcessError         ModelAPIError, not retryable
    (none: the adapter's own deadline)  RequestTimeoutError        ModelTimeoutError (retryable)
    (none: a scope that was cancelled)  RequestCancelledError      ModelError

An error that a server answered with has its answer as ``response``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as core

from pagedllm import errors as engine

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
    "PermissionDeniedError",
    "QueueFullError",
    "QueueTimeoutError",
    "RateLimitError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "ResponseTimeoutError",
    "UnsupportedModelError",
    "as_langchain_error",
    "langchain_errors",
]


class InvalidRequestError(engine.InvalidRequestError, core.ModelInvalidRequestError):
    """One request is wrong; ``param`` names the field."""


class ContextLengthError(InvalidRequestError, engine.ContextLengthError, core.ContextOverflowError):
    """The prompt, alone or with ``max_tokens``, can never fit."""


class ConfigError(engine.ConfigError, core.ModelError):
    """An engine option is wrong, or this machine cannot meet it."""


class ModelLoadError(engine.ModelLoadError, core.ModelError):
    """The model cannot be used."""


class ModelNotFoundError(ModelLoadError, engine.ModelNotFoundError, core.ModelNotFoundError):
    """No model at that name or path."""


class ModelFileError(ModelLoadError, engine.ModelFileError):
    """A model file is damaged or incomplete."""


class UnsupportedModelError(ModelLoadError, engine.UnsupportedModelError):
    """A model that the engine does not implement."""


class MissingDependencyError(engine.MissingDependencyError, core.ModelError):
    """An optional package is not installed."""


class AccessError(engine.AccessError, core.ModelError):
    """A server does not let us in."""


class AuthenticationError(AccessError, engine.AuthenticationError, core.ModelAuthenticationError):
    """The server does not know the ``api_key``, or needs one."""


class PermissionDeniedError(AccessError, engine.PermissionDeniedError, core.ModelPermissionDeniedError):
    """The ``api_key`` may not do this."""


class EngineError(engine.EngineError, core.ModelAPIError):
    """The engine cannot serve. Retryable: the next call finds or starts a living engine."""


class OverloadedError(EngineError, engine.OverloadedError):
    """The engine is too busy now; the same request may succeed later."""


class QueueFullError(OverloadedError, engine.QueueFullError):
    """As many requests as may wait are waiting already."""


class QueueTimeoutError(OverloadedError, engine.QueueTimeoutError):
    """The request waited as long as it may."""


class RateLimitError(OverloadedError, engine.RateLimitError, core.ModelRateLimitError):
    """The server takes no more requests from this client now."""


class ConnectionFailedError(EngineError, engine.ConnectionFailedError, core.ModelConnectionError):
    """The server cannot be reached, or the connection was lost before the answer was complete."""


class ResponseTimeoutError(EngineError, engine.ResponseTimeoutError, core.ModelTimeoutError):
    """The server was silent for too long."""


class EngineClosedError(EngineError, engine.EngineClosedError):
    """The engine was closed."""


class EngineDeadError(EngineError, engine.EngineDeadError):
    """The engine's worker died."""


class ForkedProcessError(EngineError, engine.ForkedProcessError):
    """The engine belongs to the parent process."""

    # Trying again in the same child meets the same parent's engine.
    is_retryable = False


class RequestTimeoutError(engine.PagedLLMError, core.ModelTimeoutError):
    """The answer took longer than ``timeout``; the request was aborted."""


class RequestCancelledError(engine.PagedLLMError, core.ModelError):
    """The call began in a ``cancel_scope`` that was cancelled before."""


class _OtherError(engine.PagedLLMError, core.ModelError):
    """An engine error that this version does not know more about."""


_CLASSES: dict[type[engine.PagedLLMError], type[engine.PagedLLMError]] = {
    engine.PagedLLMError: _OtherError,
    engine.InvalidRequestError: InvalidRequestError,
    engine.ContextLengthError: ContextLengthError,
    engine.ConfigError: ConfigError,
    engine.ModelLoadError: ModelLoadError,
    engine.ModelNotFoundError: ModelNotFoundError,
    engine.ModelFileError: ModelFileError,
    engine.UnsupportedModelError: UnsupportedModelError,
    engine.MissingDependencyError: MissingDependencyError,
    engine.AccessError: AccessError,
    engine.AuthenticationError: AuthenticationError,
    engine.PermissionDeniedError: PermissionDeniedError,
    engine.EngineError: EngineError,
    engine.OverloadedError: OverloadedError,
    engine.QueueFullError: QueueFullError,
    engine.QueueTimeoutError: QueueTimeoutError,
    engine.RateLimitError: RateLimitError,
    engine.ConnectionFailedError: ConnectionFailedError,
    engine.ResponseTimeoutError: ResponseTimeoutError,
    engine.EngineClosedError: EngineClosedError,
    engine.EngineDeadError: EngineDeadError,
    engine.ForkedProcessError: ForkedProcessError,
}


def as_langchain_error(error: engine.PagedLLMError) -> engine.PagedLLMError:
    """The same error, same message and attributes, in both trees; the original becomes its ``__cause__``."""
    if isinstance(error, core.ModelError):
        return error
    nearest = next(base for base in type(error).__mro__ if base in _CLASSES)
    converted = _CLASSES[nearest](*error.args)
    converted.__dict__.update(error.__dict__)
    converted.__cause__ = error
    return converted


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Let engine errors leave the block as LangChain's."""
    try:
        yield
    except core.ModelError:
        raise
    except engine.PagedLLMError as error:
        raise as_langchain_error(error) from error
