"""The router that Ray Serve asks for each request: our policy behind its interface."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .messages import Call, Target
from .shared import shared_routing

__all__ = ["PrefixAffinityRouter"]


class PrefixAffinityRouter(RequestRouter):
    """Sends a call where ``PrefixRouting`` says, and what is for one replica to that one.

    It decides and reserves in one step without waiting for anybody; the accounts are kept by who sends the calls.
    """

    def initialize_state(self, *, deployment: str, policy: str) -> None:
        """Take the arguments of the deployment's configuration.

        Args:
            deployment: Its name, by which the accounts are found.
            policy: ``"prefix"`` or ``"power_of_two"``.
        """
        self._routing = shared_routing(self.app_name, deployment)
        self._policy = policy
        self._random = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, best first. Ray takes the first that is not full; of a group the one least busy."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        subject = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(subject, Target) and subject.replica in by_name:
            return [[by_name[subject.replica]]]
        if isinstance(subject, Call):
            if self._policy == "prefix":
                decision = self._routing.choose(subject.query)
                groups = [[by_name[name]] for name in decision.replicas if name in by_name]
                if groups:
                    return groups
            candidate_replicas = [
                replica for name, replica in by_name.items() if name not in subject.query.excluded
            ] or candidate_replicas
        return [self._random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are the replicas now."""
        super().update_replicas(replicas)
        self._routing.set_replicas(replica.replica_id.unique_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica, without waiting for the controller to notice."""
        super().on_replica_actor_died(replica_id)
        self._routing.forget(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken a call; it may be another than the best one."""
        super().on_request_routed(pending_request, replica_id, result)
        subject = pending_request.args[0] if pending_request.args else None
        if isinstance(subject, Call):
            self._routing.moved(subject.query.request_id, replica_id.unique_id)
