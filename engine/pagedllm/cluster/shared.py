"""The routing accounts of this process, one for each deployment.

Ray Serve builds the router itself, inside the handle, and gives it nothing but values; who sends requests through the
handle has to tell it how they went. Both find the same accounts here.
"""

from __future__ import annotations

import threading

from .routing import PrefixRouting

__all__ = ["shared_routing"]

_lock = threading.Lock()
_accounts: dict[tuple[str, str], PrefixRouting] = {}


def shared_routing(app: str, deployment: str) -> PrefixRouting:
    """The accounts for a deployment of an application; new ones at first."""
    with _lock:
        return _accounts.setdefault((app, deployment), PrefixRouting())
