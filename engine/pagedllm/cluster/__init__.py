"""More than one engine behind one URL: replicas on Ray Serve, and a router that knows what each of them has cached.

``serve run pagedllm.cluster:app`` runs it; arguments are options of the engine, the server and the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(args: Mapping[str, Any]) -> Application:
    """Build the application from ``name=value`` arguments, or from ``args`` in a Serve configuration file.

    Raises:
        ConfigError: An option is unknown or wrong.
        MissingDependencyError: Ray is not installed.
    """
    from .arguments import build_from_arguments  # noqa: PLC0415  Ray is an extra

    return build_from_arguments(args)
