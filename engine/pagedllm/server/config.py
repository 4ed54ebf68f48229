"""What a server is built from: one frozen, validated value."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from ..errors import ConfigError
from .auth import ApiKey

__all__ = ["ServerConfig", "is_loopback"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve.

    Args:
        host: Address to listen on; one that others can reach needs API keys.
        port: 0 lets the system choose.
        served_model_name: What clients call the model; None: its name, or the last part of its path.
        api_keys: Who may ask; none: everybody who can reach the address.
        allow_unauthenticated: Serve without keys on any address.
        share_cache: Let keys share cached prefixes, which lets each find out what others sent.
        max_body_bytes: Longest body of a request.
        max_prompts: Most prompts in one call.
        max_choices: Most texts in one call: prompts times ``n``.
        max_logit_bias: Most tokens that one request may bias.
        max_stop_chars: Longest stop string.
        max_open_requests: Calls that are answered or wait at once; more are refused with 503.
        max_open_requests_per_key: Likewise for each key, with 429; None: half of all when there are several keys.
        max_pinned_tokens_per_key: Tokens that ``retain`` may keep for each key; None: an equal share of half the KV
            pool when there are several keys.
        request_timeout_s: Longest time from a request to the end of its answer.
        idle_timeout_s: How long a client may take to send its body, or to read what was sent to it.
        stuck_after_s: When the engine counts as stuck, if it does not finish a step.
        shutdown_timeout_s: How long running requests may go on after SIGTERM.

    Raises:
        ConfigError: Naming the option, its value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    allow_unauthenticated: bool = False
    share_cache: bool = False
    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    max_choices: int = 128
    max_logit_bias: int = 1024
    max_stop_chars: int = 1024
    max_open_requests: int = 1024
    max_open_requests_per_key: int | None = None
    max_pinned_tokens_per_key: int | None = None
    request_timeout_s: float = 600.0
    idle_timeout_s: float = 60.0
    stuck_after_s: float = 60.0
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_choices", "max_open_requests"):
            self._check_number(name, minimum=1)
        for name in ("max_logit_bias", "max_stop_chars", "max_pinned_tokens_per_key"):
            self._check_number(name, minimum=0)
        self._check_number("max_open_requests_per_key", minimum=1)
        for name in ("request_timeout_s", "idle_timeout_s", "stuck_after_s"):
            self._check_number(name, minimum=0.001)
        self._check_number("shutdown_timeout_s", minimum=0)
        if not 0 <= self.port <= 65535:
            raise ConfigError.for_value("port", self.port, "must be between 0 and 65535")
        if not self.api_keys and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigError.for_value(
                "host", self.host, "others can reach it: give API keys, or --allow-unauthenticated to serve everybody"
            )

    @property
    def open_requests_per_key(self) -> int:
        if self.max_open_requests_per_key is not None:
            return self.max_open_requests_per_key
        return self.max_open_requests if len(self.api_keys) < 2 else max(1, self.max_open_requests // 2)

    def _check_number(self, name: str, *, minimum: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and (not is_number or not math.isfinite(value) or value < minimum):
            raise ConfigError.for_value(name, value, f"must be a number of at least {minimum:g}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
