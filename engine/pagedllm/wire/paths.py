"""Where each endpoint is, from the server's root."""

from __future__ import annotations

from .sampling import Kind

__all__ = [
    "CACHE_MATCH",
    "CACHE_RESET",
    "CACHE_STATS",
    "CACHE_WARM",
    "DETOKENIZE",
    "GENERATE",
    "HEALTH",
    "METRICS",
    "MODELS",
    "READY",
    "TOKENIZE",
    "VERSION",
]

GENERATE: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
MODELS = "/v1/models"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
HEALTH = "/health"
READY = "/ready"
METRICS = "/metrics"
VERSION = "/version"
CACHE_WARM = "/v1/cache/warm"
CACHE_MATCH = "/v1/cache/match"
CACHE_RESET = "/v1/cache/reset"
CACHE_STATS = "/v1/cache/stats"
