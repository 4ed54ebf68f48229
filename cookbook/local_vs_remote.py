"""One chain, twice: over an engine in this process and over a server, chosen by configuration alone.

Starts ``pagedllm serve`` itself, asks both the same questions and compares what comes back. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate

from langchain_pagedllm import ChatPagedLLM

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("human", "{question}")])
QUESTIONS = ("What is a cache?", "Why is the sky blue?")

# What differs between the two is in the profile; what the answers should be alike in is not.
CONFIG = """
temperature = 0
max_tokens = 16
model = "{model}"

[profiles.local]
engine_args = {{ dtype = "float32" }}

[profiles.remote]
base_url = "{base_url}"
"""
START_S, STOP_S = 120.0, 15.0


@contextlib.contextmanager
def running_server(model: str) -> Iterator[str]:
    """Serve a model on a free port of this machine; gives the base URL of its API."""
    # As the command "pagedllm serve", of the Python that runs this.
    program = [sys.executable, "-c", "from pagedllm.cli import run; run()", "serve"]
    server = subprocess.Popen([*program, "--model", model, "--dtype", "float32", "--port", "0"], stderr=subprocess.PIPE)
    try:
        yield f"{_read_address(server)}/v1"
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        assert server.stderr is not None
        server.stderr.close()


def _read_address(server: subprocess.Popen[bytes]) -> str:
    """The address that the server tells when it has loaded its model."""
    assert server.stderr is not None
    deadline, seen = time.monotonic() + START_S, b""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([server.stderr], [], [], 0.5)
        if ready:
            data = os.read(server.stderr.fileno(), 65536)
            seen += data
            for line in seen.decode(errors="replace").splitlines(keepends=True):
                if line.startswith("Serving ") and line.endswith("\n"):
                    return line.split(" at ")[1].strip()
            if not data:
                break
    raise SystemExit(f"the server did not start:\n{seen.decode(errors='replace')}")


def ask(model: BaseChatModel) -> dict[str, Any]:
    """All questions: each alone, streamed, then all at once."""
    chain = PROMPT | model
    inputs = [{"question": question} for question in QUESTIONS]
    start = time.perf_counter()
    singles = [chain.invoke(item) for item in inputs]
    streams = ["".join(chunk.text for chunk in chain.stream(item)) for item in inputs]
    batch = chain.batch(inputs)
    return {
        "texts": [message.text for message in singles],
        "streams": streams,
        "batch": [message.text for message in batch],
        "tokens": [_counts(message) for message in singles],
        "metadata": sorted(singles[0].response_metadata),
        "seconds": round(time.perf_counter() - start, 2),
    }


def _counts(message: AIMessage) -> list[int]:
    assert message.usage_metadata is not None
    return [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]]


def main() -> None:
    """Ask both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or path (default: %(default)s)")
    options = parser.parse_args()
    with running_server(options.model) as base_url, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pagedllm.toml"
        config.write_text(CONFIG.format(model=options.model, base_url=base_url))
        answers = {}
        for profile in ("local", "remote"):
            model = ChatPagedLLM.from_config(config, profile=profile)
            model.invoke("Hello!", max_tokens=1)  # the first call loads the model
            answers[profile] = ask(model)
    local, remote = answers["local"], answers["remote"]
    for question, text, other in zip(QUESTIONS, local["texts"], remote["texts"], strict=True):
        print(f"\nQ: {question}\nlocal:  {text}\nremote: {other}")
    equal = {name: local[name] == remote[name] for name in local if name != "seconds"}
    seconds = {profile: answer["seconds"] for profile, answer in answers.items()}
    print(f"\nlocal {seconds['local']} s, remote {seconds['remote']} s")
    print(json.dumps({"equal": equal, "seconds": seconds}))
    if not all(equal.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
