"""The cookbook that compares both backends, run as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cookbook" / "local_vs_remote.py"


@pytest.mark.model
def test_both_answer_alike() -> None:
    """A chain that answers otherwise when only its configuration changed."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["equal"] == dict.fromkeys(["texts", "streams", "batch", "tokens", "metadata"], True)
