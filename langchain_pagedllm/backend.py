"""Which engine serves a model: one in this process, one behind a URL, or one that the caller has."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from typing_extensions import Self

from pagedllm.api import Engine
from pagedllm.config import DEFAULT_MODEL, EngineConfig
from pagedllm.errors import ConfigError, InvalidRequestError, PagedLLMError

from .profiles import read_profile

if TYPE_CHECKING:
    from pagedllm.remote import RemoteConfig, RemoteEngine

__all__ = ["DEFAULT", "BackendModel"]

DEFAULT = "default"
"""The model that the backend has: the embedded one in this process, the one that a server names first."""

_REMOTE_FIELDS = ("connect_timeout", "read_timeout", "stream_idle_timeout")


class BackendModel(BaseModel):
    """The fields that choose an engine, and the way to it.

    Constructing one loads nothing and connects to nothing. The engine is looked up per call in a process-wide registry
    by its configuration, so copies, pickles and reconfigured models find the same one, and no handle lives on the
    object.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        populate_by_name=True,
        # Fields named model_* are LangChain's convention.
        protected_namespaces=(),
        # A validation error must not print an api_key that stood beside the wrong value.
        hide_input_in_errors=True,
    )

    model_name: str = Field(default_factory=lambda: os.environ.get("PAGEDLLM_MODEL") or DEFAULT, alias="model")
    """Model name or path. Default: ``PAGEDLLM_MODEL``, else the embedded model, or the one that the server serves."""

    backend: Literal["auto", "local", "remote"] = "auto"
    """``local``: an engine in this process. ``remote``: one behind ``base_url``. ``auto``: remote if there is a
    ``base_url``. The settings of the backend that is not chosen are kept for a later choice."""

    base_url: str | None = Field(default_factory=lambda: os.environ.get("PAGEDLLM_BASE_URL") or None)
    """Where a server's OpenAI API begins, such as ``http://host:8000/v1``. Default: ``PAGEDLLM_BASE_URL``."""

    api_key: SecretStr | None = Field(default_factory=secret_from_env("PAGEDLLM_API_KEY", default=None))
    """The server's key. Default: ``PAGEDLLM_API_KEY``. An engine in this process asks for none."""

    connect_timeout: float = 10.0
    """Seconds for connecting to the server."""

    read_timeout: float = 600.0
    """Seconds from a request to the beginning of its answer; of an answer that is not streamed, to its end."""

    stream_idle_timeout: float = 120.0
    """Seconds between two pieces of a streamed answer."""

    max_retries: int | None = None
    """How often a request is sent again that the server has not begun. None: twice. In this process nothing can be
    lost on the way."""

    max_connections: int = 64
    """Most requests to the server at once; more wait."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Options of ``pagedllm.config.EngineConfig`` other than the model, such as ``{"dtype": "float32"}``, for an engine
    in this process; a server has its own."""

    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An engine of your own, used instead of a shared one and never closed here. Pickling leaves it behind."""

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], *, profile: str | None = None, **arguments: Any) -> Self:
        """Build from a TOML file, whose entries are the constructor's arguments.

        Entries at the top hold for all profiles; those of the table ``[profiles.NAME]`` come on top of them::

            temperature = 0
            profile = "dev"            # where the caller names none

            [profiles.dev]
            engine_args = {dtype = "float32"}

            [profiles.prod]
            base_url = "https://llm.example.com/v1"

        Args:
            path: The file.
            profile: Which; None: the one that the file names, else the entries at the top alone.
            arguments: Come on top of the file's.

        Raises:
            ConfigError: The file cannot be read, or has no such profile.
            pydantic.ValidationError: An entry is wrong; it is named.
        """
        return cls(**{**read_profile(Path(path), profile), **arguments})

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.engine is not None:
            self._check_own_engine()
            return self
        if self.backend == "remote" and self.base_url is None:
            raise ConfigError("backend='remote' needs base_url, or the variable PAGEDLLM_BASE_URL")
        if self.backend == "auto" and self.base_url is not None and self.engine_args:
            raise ConfigError(
                f"engine_args have no effect on the server at base_url={self.base_url!r} (perhaps from "
                "PAGEDLLM_BASE_URL): set its options there, or choose with backend='local' or backend='remote'"
            )
        self._engine_config()
        if self.base_url is not None:
            self._remote_config()
        if self.model_name == DEFAULT and not self._is_remote:
            self.model_name = DEFAULT_MODEL
        return self

    def _check_own_engine(self) -> None:
        assert self.engine is not None
        if self.engine_args:
            raise ConfigError("engine_args have no effect on an engine that exists: give either")
        if self.backend != "auto":
            raise ConfigError.for_value("backend", self.backend, "has no effect on an engine that exists: give either")
        if self.base_url is not None and "base_url" in self.model_fields_set:
            raise ConfigError("base_url has no effect on an engine that exists: give either")
        self.base_url = None  # from the environment, and meant for others
        if "model_name" not in self.model_fields_set:
            self.model_name = self.engine.model_info().model
        self._check_engine_model()

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The constructor argument that is secret, and the variable that it comes from."""
        return {"api_key": "PAGEDLLM_API_KEY"}

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "engine": None}}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        if self.engine is not None:
            # A copy of a model shares its engine; an engine itself cannot be copied.
            memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    # --- The engine ---

    @property
    def _is_remote(self) -> bool:
        return self.engine is None and (
            self.backend == "remote" or (self.backend == "auto" and self.base_url is not None)
        )

    @property
    def _served_name(self) -> str:
        """The name of the model that answers; if it is the server's to say, known once it has answered."""
        if self._is_remote and self.model_name == DEFAULT:
            return self._remote_engine().served_model or self.model_name
        return self.model_name

    def _engine_params(self) -> dict[str, Any]:
        """What tells the engine from others in a response cache's key and in traces; no secret."""
        if self.engine is not None:
            info = self.engine.model_info()
            return {"engine_args": {"dtype": info.dtype, "max_model_len": info.max_model_len}}
        if self._is_remote:
            return {"base_url": self._remote_config().base_url}
        options = vars(self._engine_config())
        return {"engine_args": {name: value for name, value in options.items() if name != "model"}}

    def _engine_config(self) -> EngineConfig:
        if "model" in self.engine_args:
            raise ConfigError("engine_args: give the model as model=")
        model = DEFAULT_MODEL if self.model_name == DEFAULT else self.model_name
        return EngineConfig.from_options({"model": model, **self.engine_args})

    def _remote_config(self) -> RemoteConfig:
        # Lazy door: an engine in this process needs no HTTP.
        from pagedllm.remote import RemoteConfig  # noqa: PLC0415

        options: dict[str, Any] = {f"{name}_s": getattr(self, name) for name in _REMOTE_FIELDS}
        if self.max_retries is not None:
            options["max_retries"] = self.max_retries
        return RemoteConfig(
            base_url=self.base_url or "",
            api_key=self.api_key.get_secret_value() or None if self.api_key is not None else None,
            model=None if self.model_name == DEFAULT else self.model_name,
            max_connections=self.max_connections,
            **options,
        )

    def _remote_engine(self) -> RemoteEngine:
        from pagedllm.remote import shared_remote_engine  # noqa: PLC0415  see above

        return shared_remote_engine(self._remote_config())

    def _check_engine_model(self) -> None:
        if self.engine is not None and self.model_name != (served := self.engine.model_info().model):
            raise InvalidRequestError.for_value("model", self.model_name, f"the given engine serves {served!r}")

    def _get_engine(self) -> Engine:
        """The engine, loaded if it is one of this process and is not yet."""
        if self.engine is not None:
            self._check_engine_model()
            return self.engine
        if self._is_remote:
            return self._remote_engine()
        # Lazy door: the local engine brings torch.
        from pagedllm.registry import shared_engine  # noqa: PLC0415

        return shared_engine(self._engine_config())

    async def _aget_engine(self) -> Engine:
        # Loading takes seconds, which the event loop must not wait for.
        return self._get_engine() if self.engine is not None else await asyncio.to_thread(self._get_engine)

    def _max_concurrency(self) -> int:
        """Most requests that are worth a thread each."""
        if self._is_remote:
            return self.max_connections
        config = EngineConfig() if self.engine is not None else self._engine_config()
        # What "auto" means, only a loaded engine knows, and a given one may be far away.
        return config.step_limits("cuda" if config.device == "cuda" else "cpu").max_num_seqs

    def _max_model_len(self) -> int | None:
        """The longest sequence in tokens, without loading the model or asking a server; None if it is not known."""
        if self.engine is not None:
            return self.engine.model_info().max_model_len
        if self._is_remote:
            info = self._remote_engine().known_info
            return info.max_model_len or None if info is not None else None
        limit = self._engine_config().max_model_len
        try:
            described = _described_max_model_len(self._engine_config().model)
        except PagedLLMError:
            return limit
        return described if limit is None else min(limit, described)


def _described_max_model_len(model: str) -> int:
    # Lazy door: only profiles look at files.
    from pagedllm.files.locate import locate_model  # noqa: PLC0415

    # A profile is asked for in passing: it must not start a download.
    files = locate_model(model, local_only=True)
    metadata = files.path / "config.json" if files.kind == "folder" else files.path
    return _read_max_model_len(files, metadata.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_max_model_len(files: Any, modified_ns: int) -> int:
    """Read once per state of the file: a GGUF file takes 0.1 s, and LangChain builds models anew for every call."""
    del modified_ns
    from pagedllm.files.description import describe_model  # noqa: PLC0415

    return describe_model(files).max_model_len
