"""``serve run pagedllm.cluster:app``: what its arguments make of the three configurations."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pagedllm.cluster import app
from pagedllm.errors import ConfigError


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the application would be built from."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about what it imports
        from pagedllm.cluster import arguments
    seen: dict[str, Any] = {}

    def build(config: Any, server_config: Any, cluster_config: Any) -> str:
        seen.update(engine=config, server=server_config, cluster=cluster_config)
        return "application"

    monkeypatch.setattr(arguments, "build_application", build)
    for variable in ("PAGEDLLM_API_KEY", "PAGEDLLM_API_KEYS"):
        monkeypatch.delenv(variable, raising=False)
    return seen


def test_text_of_a_command_line(built: dict[str, Any]) -> None:
    """All values are text there."""
    given = {"model": "1234", "max_num_seqs": "7", "enable_prefix_caching": "false", "replicas": "3"}
    assert app(given) == "application"
    assert (built["engine"].model, built["engine"].max_num_seqs) == ("1234", 7)
    assert built["engine"].enable_prefix_caching is False
    assert built["cluster"].replicas == 3
    assert built["server"].host == "127.0.0.1", "without keys, only names of this machine are let in"


def test_values_of_a_file(built: dict[str, Any]) -> None:
    app({"max_model_len": 512, "chat_template_kwargs": {"enable_thinking": False}, "max_replicas": 4, "replicas": 2})
    assert built["engine"].max_model_len == 512
    assert built["engine"].chat_template_kwargs == (("enable_thinking", False),)
    assert built["cluster"].scales


def test_keys_come_from_the_environment(built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDLLM_API_KEYS", "alice secret-of-alice")
    app({})
    assert [key.name for key in built["server"].api_keys] == ["alice"]
    assert built["server"].host == "0.0.0.0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": "2"}, "unknown option 'replica'"),
        ({"port": "80"}, "unknown option 'port'"),
        ({"api_keys": "x"}, "unknown option 'api_keys'"),
        ({"replicas": "two"}, "replicas='two': must be JSON"),
        ({"replicas": "0"}, "replicas=0"),
        ({"max_num_seqs": '"7"'}, "max_num_seqs='7'"),
    ],
)
def test_wrong_arguments_are_named(built: dict[str, Any], args: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(args)
    assert not built
