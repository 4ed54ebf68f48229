"""The files of docs/scaling.md: as Ray reads them, and with arguments that the application takes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.fixture
def documents() -> list[Any]:
    pytest.importorskip("ray")
    import yaml

    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)]


def test_cluster_file(documents: list[Any]) -> None:
    """Ray's launcher refuses what its schema does not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.autoscaler._private.util import prepare_config, validate_config

        validate_config(prepare_config(documents[0]))


def test_application_file(documents: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.serve.schema import ServeDeploySchema

        from pagedllm.cluster import app, arguments

        (application,) = ServeDeploySchema.model_validate(documents[1]).applications
    assert application.import_path == "pagedllm.cluster:app"
    for name, value in documents[1]["applications"][0]["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(arguments, "build_application", lambda *configs: configs)
    config, server_config, cluster_config = app(application.args)
    assert config.max_model_len == 16384
    assert [key.is_admin for key in server_config.api_keys] == [False, True]
    assert (cluster_config.num_gpus, cluster_config.scales) == (1, True)
