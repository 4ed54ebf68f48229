"""An engine behind a URL: ``RemoteEngine`` obeys the Engine protocol over HTTP, without torch."""

from .config import RemoteConfig
from .engine import RemoteEngine
from .shared import shared_remote_engine

__all__ = ["RemoteConfig", "RemoteEngine", "shared_remote_engine"]
