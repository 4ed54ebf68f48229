"""The Serve application: engines, and an ingress with the same routes as a single server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from ..config import EngineConfig
from ..server.app import create_app
from ..server.config import ServerConfig
from ..server.service import Service
from .config import ClusterConfig
from .engine import ClusterEngine
from .replica import EngineDeployment

__all__ = ["APP_NAME", "ENGINES", "build_application"]

APP_NAME = "pagedllm"
ENGINES = "EngineDeployment"
_INGRESS = "Ingress"

# Engines have queues of their own, and the ingress refuses what is too much. Ray's limits must come after both, because
# a replica that Ray takes for full would not hear that a request is to end.
_MAX_ONGOING = 1 << 16
# Of all replicas together, before the application is given up. What is wrong with a configuration stays wrong.
_MAX_STARTS = 3


def build_application(
    config: EngineConfig, server_config: ServerConfig, cluster_config: ClusterConfig
) -> serve.Application:
    """What ``serve.run`` runs.

    Args:
        config: Of each engine.
        server_config: Of each ingress; host and port are Serve's affair.
        cluster_config: How many there are of what.
    """
    engines = serve.deployment(EngineDeployment).options(**_engine_options(server_config, cluster_config))
    ingress = serve.deployment(_ingress_class(config, server_config, cluster_config)).options(
        name=_INGRESS,
        num_replicas=cluster_config.ingress_replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=server_config.shutdown_timeout_s,
    )
    return ingress.bind(engines.bind(config, cluster_config))


def _engine_options(server_config: ServerConfig, cluster_config: ClusterConfig) -> dict[str, Any]:
    router = RequestRouterConfig(
        request_router_class="pagedllm.cluster.router.PrefixAffinityRouter",
        request_router_kwargs={"deployment": ENGINES, "policy": cluster_config.router},
    )
    options: dict[str, Any] = {
        "name": ENGINES,
        "max_ongoing_requests": _MAX_ONGOING,
        "request_router_config": router,
        "ray_actor_options": {"num_cpus": cluster_config.num_cpus, "num_gpus": cluster_config.num_gpus},
        "graceful_shutdown_timeout_s": server_config.shutdown_timeout_s,
        "health_check_period_s": 5.0,
        "max_constructor_retry_count": _MAX_STARTS,
        # Ingresses ask engines for news all the time.
        "logging_config": {"enable_access_log": False},
        "health_check_timeout_s": server_config.stuck_after_s,
    }
    if not cluster_config.scales:
        return options | {"num_replicas": cluster_config.replicas}
    return options | {
        "autoscaling_config": {
            "min_replicas": cluster_config.replicas,
            "max_replicas": cluster_config.max_replicas,
            "policy": {"policy_function": "pagedllm.cluster.autoscaling:scale"},
        }
    }


def _ingress_class(config: EngineConfig, server_config: ServerConfig, cluster_config: ClusterConfig) -> type:
    def build() -> FastAPI:
        """The single server's application over all engines; runs in the ingress's process."""
        handle = serve.get_deployment_handle(ENGINES, app_name=serve.get_replica_context().app_name)
        engine = ClusterEngine(handle, config, follows=cluster_config.router == "prefix")
        return create_app(Service(engine, server_config))

    @serve.ingress(build)
    class Ingress:
        """Parses requests and sends them on.

        Args:
            engines: Makes them part of the application; ``build`` finds them by name.
        """

        def __init__(self, engines: Any) -> None:
            self._engines = engines

    return Ingress
