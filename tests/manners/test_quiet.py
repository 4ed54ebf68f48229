"""What a library must leave alone, and what it says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import pagedllm
from pagedllm.errors import ConfigError

# A pool that does not hold the model's longest sequence is worth a warning.
ANSWER = """
from langchain_pagedllm import ChatPagedLLM

args = {"dtype": "float32", "kv_cache_memory_bytes": 2**20}
model = ChatPagedLLM(model=path, engine_args=args, max_tokens=3, stop=["quetzalcoatl"])
model.invoke("xylophone")
try:
    model.invoke("xylophone", max_tokens=10**6)
except ValueError:
    pass
"""
SECRETS = ("xylophone", "quetzalcoatl")


def environ(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PAGEDLLM_")} | variables


def err_of(child: Any) -> str:
    code, lines, err = child.finish()
    assert (code, lines) == (0, []), err
    return err


def test_silent_unless_asked(start_child: Callable[..., Any]) -> None:
    assert err_of(start_child(ANSWER, environ=environ())) == ""


def test_level_of_the_environment(start_child: Callable[..., Any]) -> None:
    """Without any handler of the application the user would set the variable and see nothing."""
    err = err_of(start_child(ANSWER, environ=environ(PAGEDLLM_LOG_LEVEL="debug")))
    assert err.count("WARNING pagedllm.compute.memory: max_model_len lowered") == 1
    assert " INFO pagedllm" in err
    assert not [secret for secret in SECRETS if secret in err]


def test_an_application_that_logs_gets_each_record_once(start_child: Callable[..., Any]) -> None:
    script = "import logging\nlogging.basicConfig(format='app %(name)s %(message)s')\n"
    err = err_of(start_child(script + ANSWER, environ=environ(PAGEDLLM_LOG_LEVEL="INFO")))
    assert err.count("max_model_len lowered") == 1
    assert all(line.startswith("app pagedllm.") for line in err.splitlines())


def test_a_misspelt_level_does_not_break_the_import(start_child: Callable[..., Any]) -> None:
    err = err_of(start_child("import pagedllm", environ=environ(PAGEDLLM_LOG_LEVEL="loud")))
    assert "PAGEDLLM_LOG_LEVEL='loud': must be one of DEBUG" in err


def test_the_process_is_left_as_it_was(start_child: Callable[..., Any]) -> None:
    """Threads, dtype, grad mode, random state, warning filters, root logger, signal handlers belong to the user."""
    script = """
import logging, random, warnings
import numpy, torch, transformers


def state():
    root = logging.getLogger()
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "random": (torch.initial_seed(), torch.get_rng_state().sum().item(), random.getstate()[1][-1]),
        "numpy": tuple(numpy.random.get_state()[1][:5]),
        # Other packages add filters for their own warnings when parts of them are imported; ours would be general.
        "warnings": [item for item in warnings.filters if item[2].__module__ == "builtins" and item[3] is None],
        "root": (root.level, list(root.handlers), logging.lastResort, logging.getLogger("transformers").level),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
    }


before = state()
"""
    script += ANSWER + "after = state()\nprint([name for name in before if before[name] != after[name]])"
    child = start_child(script, environ=environ(PAGEDLLM_NUM_THREADS="1"))
    assert child.lines() == ["[]"]


def test_importing_does_nothing_else(start_child: Callable[..., Any]) -> None:
    script = """
import logging
before = set(sys.modules), threading.active_count()
import pagedllm
ours = {name for name in sys.modules if name.split(".")[0] == "pagedllm"}
print(sorted(ours), threading.active_count() == before[1], "torch" in sys.modules)
print([type(handler).__name__ for handler in logging.getLogger("pagedllm").handlers])
"""
    modules, handlers = start_child(script, environ=environ()).lines()
    assert modules == "['pagedllm', 'pagedllm.errors', 'pagedllm.logs'] True False"
    assert handlers == "['NullHandler']"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_a_wrong_number_of_engines(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_engines=.*whole number"):
        pagedllm.set_max_engines(value)


def test_public_names() -> None:
    assert {"unload", "set_max_engines"} <= set(dir(pagedllm))
    with pytest.raises(AttributeError, match="nonsense"):
        pagedllm.nonsense  # noqa: B018
