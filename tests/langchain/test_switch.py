"""One set of fields for an engine in this process and one behind a URL; switching is a matter of configuration."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core import exceptions as core
from langchain_core.load import dumpd, dumps
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from scripted_server import ScriptedServer
from served_engine import served

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.errors import ConfigError
from pagedllm.remote import RemoteEngine
from pagedllm.server.auth import ApiKey

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])
URL = "http://127.0.0.1:9/v1"
KEY = "sk-secret-key"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDLLM_BASE_URL", "PAGEDLLM_API_KEY", "PAGEDLLM_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def source() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(source: FakeEngine) -> Iterator[str]:
    with served(source) as url:
        yield url


def backend_of(model: Any) -> str:
    return "remote" if isinstance(model._get_engine(), RemoteEngine) else "local"


@BOTH
def test_base_url_chooses_remote(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cls()._is_remote
    assert cls(base_url=URL)._is_remote
    assert backend_of(cls(base_url=URL)) == "remote"
    assert not cls(base_url=URL, backend="local")._is_remote
    monkeypatch.setenv("PAGEDLLM_BASE_URL", URL)
    monkeypatch.setenv("PAGEDLLM_API_KEY", KEY)
    monkeypatch.setenv("PAGEDLLM_MODEL", "m")
    config = cls()._get_engine().config
    assert (config.base_url, config.api_key, config.model) == (URL, KEY, "m")
    assert not cls(backend="local")._is_remote


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "remote"}, "needs base_url, or the variable PAGEDLLM_BASE_URL"),
        ({"backend": "cloud"}, "backend"),
        ({"base_url": "host:8000"}, "base_url='host:8000': must begin with http"),
        ({"base_url": "ftp://host/v1"}, "must begin with http"),
        ({"base_url": "http://host:port/v1"}, "not a URL"),
        ({"base_url": "http://me:sk-secret-key@host/v1"}, "must not hold a user or password"),
        ({"base_url": "http://host/v1?x=1"}, "no query"),
        ({"base_url": URL, "engine_args": {"dtype": "float32"}}, "engine_args have no effect on the server"),
        ({"backend": "remote", "base_url": URL, "engine_args": {"dtipe": "x"}}, "unknown engine option 'dtipe'"),
        ({"base_url": URL, "max_retries": -1}, "max_retries=-1"),
        ({"base_url": URL, "connect_timeout": 0}, "connect_timeout_s=0"),
        ({"base_url": URL, "max_connections": 0}, "max_connections=0"),
        ({"base_url": URL, "api_key": "sk-secret-key\n"}, "api_key: must be printable"),
        ({"base_url": URL, "engine": FakeEngine()}, "base_url has no effect on an engine that exists"),
        ({"backend": "local", "engine": FakeEngine()}, "backend='local': has no effect on an engine that exists"),
    ],
)
@BOTH
def test_wrong_choice_is_named(cls: Any, arguments: dict[str, Any], message: str) -> None:
    """A setting without effect would be found only by its bill."""
    with pytest.raises(ValueError, match=message) as caught:
        cls(**{"api_key": KEY, **arguments})
    assert KEY not in str(caught.value)


def test_environment_does_not_touch_an_engine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDLLM_BASE_URL", URL)
    model = ChatPagedLLM(engine=FakeEngine(), temperature=0)
    assert model.base_url is None
    assert model.invoke("Hello").text


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://gateway/llm/v1", "https://gateway/llm/v1"),
        ("https://gateway/llm", "https://gateway/llm"),
    ],
)
def test_url_forms(given: str, want: str) -> None:
    assert ChatPagedLLM(base_url=given)._get_engine().config.base_url == want  # type: ignore[attr-defined]


@BOTH
def test_copies_share_one_engine(cls: Any) -> None:
    """LangChain builds models anew for each call; each would open its own connections."""
    model = cls(base_url=URL, api_key=KEY)
    copies = [
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        cls(base_url=URL, api_key=KEY),
        model.model_copy(update={"temperature": 0.5}),
    ]
    assert len({id(each._get_engine()) for each in [model, *copies]}) == 1
    assert cls(base_url=URL, api_key="another-key")._get_engine() is not model._get_engine()


@BOTH
def test_key_is_never_shown(cls: Any) -> None:
    model = cls(base_url=URL, api_key=KEY)
    shown = [repr(model), str(model), dumps(model), str(dumpd(model)), str(model.asdict()), str(model.model_dump())]
    shown += [model.model_dump_json(), str(model._identifying_params), str(model._get_ls_params())]
    shown += [repr(model._get_engine().config), str(model.to_json())]
    assert not any(KEY in text for text in shown)
    assert model._identifying_params["base_url"] == URL
    assert "engine_args" not in model._identifying_params


def test_profiles(tmp_path: Path, url: str) -> None:
    """From development to production by the name of a profile."""
    file = tmp_path / "pagedllm.toml"
    file.write_text(
        f"""
        temperature = 0
        max_tokens = 9
        profile = "dev"

        [profiles.dev]
        model = "/models/tiny"
        engine_args = {{dtype = "float32"}}

        [profiles.prod]
        base_url = "{url}"
        max_tokens = 12
        """
    )
    dev, prod = ChatPagedLLM.from_config(file), ChatPagedLLM.from_config(str(file), profile="prod")
    assert (dev._is_remote, dev.model, dev.max_tokens, dev.engine_args) == (
        False,
        "/models/tiny",
        9,
        {"dtype": "float32"},
    )
    assert (prod._is_remote, prod.max_tokens, prod.temperature) == (True, 12, 0)
    assert PagedLLM.from_config(file, profile="prod", max_tokens=3).max_tokens == 3
    assert prod.invoke("Hello").usage_metadata["output_tokens"] == 12  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"profile='test': .* has dev, prod"):
        ChatPagedLLM.from_config(file, profile="test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature = 0", "unknown argument 'temprature'"),
        ("temperature = -1", "temperature=-1"),
        ("= 3", "is not TOML"),
        ("profiles = 3", "must be tables"),
        ('profile = "x"', "has no profiles"),
    ],
)
def test_wrong_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pagedllm.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        ChatPagedLLM.from_config(file)
    with pytest.raises(ConfigError, match="cannot read"):
        ChatPagedLLM.from_config(tmp_path / "nothing.toml")


def chain_over(model: Any) -> Any:
    return ChatPromptTemplate.from_template("Say {word}") | model | StrOutputParser()


def test_configurable_fields(url: str) -> None:
    """The switch at call time, for all of a chain."""
    model = ChatPagedLLM(base_url=url, temperature=0, max_tokens=20).configurable_fields(
        base_url=ConfigurableField(id="url"), max_tokens=ConfigurableField(id="most")
    )
    say = chain_over(model)
    whole = say.invoke({"word": "x"})
    assert say.with_config(configurable={"most": 5}).invoke({"word": "x"}) == whole[:5]
    with pytest.raises(core.ModelConnectionError, match="cannot connect"):
        say.with_config(configurable={"url": "http://127.0.0.1:9"}).invoke({"word": "x"})


def test_configurable_alternatives(source: FakeEngine, url: str) -> None:
    local = ChatPagedLLM(engine=source, temperature=0, max_tokens=20)
    model = local.configurable_alternatives(
        ConfigurableField(id="where"),
        default_key="local",
        remote=ChatPagedLLM(base_url=url, temperature=0, max_tokens=20),
    )
    say = chain_over(model)
    assert say.invoke({"word": "x"}) == say.with_config(configurable={"where": "remote"}).invoke({"word": "x"})
    assert list(say.with_config(configurable={"where": "remote"}).stream({"word": "x"}))


async def all_answers(model: Any) -> dict[str, Any]:
    """What each way to call a model gives."""
    streamed = list(model.stream("Hello"))
    total = streamed[0]
    for chunk in streamed[1:]:
        total += chunk
    astreamed = [chunk async for chunk in model.astream("Hello")]
    atotal = astreamed[0]
    for chunk in astreamed[1:]:
        atotal += chunk
    return {
        "invoke": model.invoke("Hello"),
        "ainvoke": await model.ainvoke("Hello"),
        "stream": total,
        "astream": atotal,
        "batch": model.batch(["Hello", "Goodbye"])[0],
        "abatch": (await model.abatch(["Hello", "Goodbye"]))[0],
    }


async def test_local_and_remote_answers_are_alike(url: str) -> None:
    """Text, usage and the keys of metadata: what a chain, a tracer or a dashboard reads."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    local = await all_answers(ChatPagedLLM(engine=FakeEngine(), **options))
    remote = await all_answers(ChatPagedLLM(base_url=url, **options))
    for way, want in local.items():
        found = remote[way]
        assert found.text == want.text, way
        assert found.usage_metadata.keys() == want.usage_metadata.keys(), way
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            assert found.usage_metadata[name] == want.usage_metadata[name], way
        assert found.response_metadata.keys() == want.response_metadata.keys(), way
        for name in ("model_name", "model_provider", "finish_reason", "logprobs"):
            assert found.response_metadata[name] == want.response_metadata[name], (way, name)
        assert found.response_metadata["timings"].keys() == want.response_metadata["timings"].keys()


def test_text_model_answers_are_alike(url: str) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "n": 2, "logprobs": True}
    local = PagedLLM(engine=FakeEngine(), **options).generate(["Hello", "Goodbye"])
    remote = PagedLLM(base_url=url, **options).generate(["Hello", "Goodbye"])
    assert remote.llm_output.keys() == local.llm_output.keys()  # type: ignore[union-attr]
    pairs = zip(chain.from_iterable(local.generations), chain.from_iterable(remote.generations), strict=True)
    for want, found in pairs:
        assert found.text == want.text
        assert found.generation_info.keys() == want.generation_info.keys()  # type: ignore[union-attr]
    assert list(PagedLLM(base_url=url, temperature=0, max_tokens=12).stream("Hello"))


@BOTH
def test_token_counts_and_profile(cls: Any, url: str, source: FakeEngine) -> None:
    model = cls(base_url=url)
    assert model.get_token_ids("Hi") == [72, 105]
    assert model.get_num_tokens("Hello") == 5
    if cls is ChatPagedLLM:
        assert model.get_num_tokens_from_messages([]) == 0
        assert ChatPagedLLM(base_url=URL).profile is None  # nothing is asked for in passing
        model._get_engine().model_info()
        assert cls(base_url=url).profile["max_input_tokens"] == source.model_info().max_model_len


@BOTH
async def test_errors_carry_the_response(cls: Any) -> None:
    """LangChain's tracing and retries read it."""
    engine = FakeEngine(max_model_len=64)
    with served(engine, api_keys=(ApiKey(name="a", secret="a-long-secret"),)) as url:
        good = {"base_url": url, "api_key": "a-long-secret"}
        cases = [
            (cls(**{**good, "api_key": "wrong-key"}), "x", core.ModelAuthenticationError, 401),
            (cls(**good, model="other"), "x", core.ModelNotFoundError, 404),
            (cls(**good), "x" * 100, core.ContextOverflowError, 400),
        ]
        for model, prompt, kind, status in cases:
            for call in (model.invoke, lambda text, model=model: list(model.stream(text))):
                with pytest.raises(kind) as caught:
                    call(prompt)
                assert caught.value.response.status_code == status
            with pytest.raises(kind) as caught:
                await model.ainvoke(prompt)
            assert caught.value.response.status_code == status
            assert not any(key in repr(vars(caught.value)) for key in ("wrong-key", "a-long-secret"))
            assert b"a-long-secret" not in pickle.dumps(caught.value.response)


@BOTH
@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
async def test_timeout(cls: Any, way: str) -> None:
    """The adapter's own deadline ends the request on the server too."""
    engine = FakeEngine(delay_s=0.02, chunk_size=1)
    with served(engine) as url:
        model = cls(base_url=url, timeout=0.3, ignore_eos=True, max_tokens=4000)
        with pytest.raises(core.ModelTimeoutError, match=r"timeout=0\.3"):  # noqa: PT012 - one statement per way
            if way == "invoke":
                model.invoke("Hello")
            elif way == "stream":
                list(model.stream("Hello"))
            elif way == "ainvoke":
                await model.ainvoke("Hello")
            else:
                async for _ in model.astream("Hello"):
                    pass
    assert (engine.num_aborts, engine.stats().num_running) == (1, 0)


def test_server_without_our_fields() -> None:
    """A chain over another server of OpenAI's API works too."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello!"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    scripts: Any = {
        "/v1/models": lambda exchange: exchange.json({"object": "list", "data": [{"id": "org/m"}]}),
        "/v1/chat/completions": lambda exchange: exchange.json(answer),
    }
    with ScriptedServer(scripts) as server:
        message = ChatPagedLLM(base_url=server.url, temperature=0, max_tokens=5).invoke("Hi")
    assert message.text == "Hello!"
    assert message.response_metadata["model_name"] == "org/m"
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_token_details"] == {"cache_read": 0, "cache_creation": 0}
    assert server.exchanges[1].body["model"] == "org/m"


def test_base_install_is_enough(url: str) -> None:
    """The remote profile must run where neither torch nor the packages of engine and server are installed."""
    script = f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {{"torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy",
                                           "huggingface_hub", "jinja2", "fastapi", "uvicorn", "prometheus_client"}}:
                    raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

        sys.meta_path.insert(0, Blocked())
        import asyncio
        from langchain_pagedllm import ChatPagedLLM, PagedLLM
        model = ChatPagedLLM(base_url={url!r}, temperature=0, max_tokens=8)
        print(len(model.invoke("Hello").text), len("".join(chunk.text for chunk in model.stream("Hello"))))
        print(len(asyncio.run(model.ainvoke("Hello")).text), len(PagedLLM(base_url={url!r}, max_tokens=8).invoke("x")))
        try:
            ChatPagedLLM(base_url={url!r}, backend="local").invoke("Hello")
        except ImportError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[:2] == ["8 8", "8 8"]
    assert "pip install 'langchain-pagedllm[local]'" in run.stdout.splitlines()[2]
