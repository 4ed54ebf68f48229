"""Engine configuration: one frozen, validated value; also the key of the shared-engine registry."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

__all__ = ["DEFAULT_GPU_MEMORY_UTILIZATION", "DEFAULT_MODEL", "EngineConfig", "StepLimits"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")
_POLICIES = ("fcfs", "priority", "shortest", "cache_aware")
_PREEMPTION_MODES = ("auto", "swap", "recompute")
_KERNELS = ("auto", "cpu", "reference", "triton")
_TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json")
_REASONING_PARSERS = ("auto", "think", "none")
# What a chat template is told by the engine.
_TEMPLATE_NAMES = frozenset(
    {
        *("add_generation_prompt", "bos_token", "documents", "eos_token", "messages", "namespace", "raise_exception"),
        *("strftime_now", "tools"),
    }
)


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The most that one step may hold.

    Args:
        max_num_seqs: Sequences.
        max_num_batched_tokens: Tokens, at least one for each of them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


# By torch's type of device. A GPU needs large steps to be busy; a CPU is busy sooner, and users wait for its steps.
_STEP_LIMITS = {
    "cpu": StepLimits(max_num_seqs=64, max_num_batched_tokens=512),
    "cuda": StepLimits(max_num_seqs=256, max_num_batched_tokens=8192),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. Names follow vLLM's.

    Args:
        model: ``"smollm2-135m"`` (the embedded model), a folder in the Hugging Face layout, a GGUF file, or a hub id
            ``org/model[@revision][:file.gguf]``.
        dtype: Type of weights and KV cache; ``"auto"`` is bfloat16 where the device computes with it, else float32,
            on a GPU float16.
        device: ``"cpu"``; ``"cuda"``, the first GPU; ``"auto"``, a GPU where there is one that
            the Triton kernels run on, else the CPU, with a log line that says why.
        kernels: ``"cpu"``, C++ compiled at first use; ``"triton"``, for GPUs; ``"reference"``, plain torch;
            ``"auto"``, what ``PAGEDLLM_KERNELS`` says, else the first that runs here.
        max_model_len: Longest sequence, prompt and completion together, in tokens. None: the model's own limit,
            lowered (with a log line) to what the KV pool holds.
        max_num_seqs: Most sequences in one step. None: 64 on a CPU, 256 on a GPU, lowered (with a log line) to what
            the KV pool holds.
        max_num_batched_tokens: Token budget of one step; longer prompts are computed in chunks of at most this. None:
            512 on a CPU, 8192 on a GPU, lowered likewise.
        block_size: Tokens per KV block.
        kv_cache_memory_bytes: Size of the KV pool. None on CPU: the least of 25 % of the available memory, 512 MiB
            and what ``max_num_seqs`` sequences of ``max_model_len`` need. None on a GPU: what
            ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: Share of a GPU's memory for weights, activations and KV pool together, above 0 and up
            to 1. None: 0.9 on a GPU; on a CPU there must be none.
        enforce_eager: On a GPU, launch every kernel in every step instead of replaying CUDA graphs. A CPU always does.
        enable_prefix_caching: Reuse the KV of full blocks across requests that share a prefix.
        swap_space: GiB of host memory for the KV of preempted sequences and of prefixes that the pool has no room for;
            0 for none.
        preemption_mode: What becomes of a preempted sequence's KV: ``"swap"``, it goes to the host and comes back;
            ``"recompute"``, it is computed again; ``"auto"``, what takes less time by measured rates.
        scheduling_policy: Who is admitted first and preempted last: ``"fcfs"``, who came first; ``"priority"``, the
            lowest ``priority``; ``"shortest"``, who has least of its prompt to compute; ``"cache_aware"``, who has most
            of it cached. None lets a request be overtaken without end.
        long_prefill_token_threshold: A prompt with more tokens to compute than this is long, and held back while others
            decode.
        max_itl_stretch: How many times as long a step with long prompts may take as one without, while others decode.
            Those for which no time is left wait, and shorter ones may pass them.
        max_num_queued_reqs: Most requests that wait for their first step; more are refused. None: any number.
        queue_timeout_s: Seconds after which a request that still waits fails. None: never.
        max_pinned_fraction: Share of the KV pool that pinned prefixes may hold, 0 to 1.
        chat_template: Used instead of the model's: Jinja (a text with ``{{`` or ``{%``), or the path of a file with it.
        chat_template_kwargs: What the chat template sees besides the chat, such as ``{"enable_thinking": False}``:
            names and plain JSON values; kept as sorted pairs.
        tool_call_parser: How the model writes tool calls: ``"hermes"``, JSON in ``<tool_call>`` tags;
            ``"llama3_json"``, bare JSON; ``"auto"``, as its chat template writes them.
        reasoning_parser: Whether its answers begin with thoughts: ``"think"``, in ``<think>`` tags; ``"none"``, they
            do not; ``"auto"``, in tags if the chat template has to do with these.

    Raises:
        ConfigError: Naming the option, its value and what is allowed.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    swap_space: float = 0.0
    preemption_mode: str = "auto"
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 256
    max_itl_stretch: float = 2.0
    max_num_queued_reqs: int | None = None
    queue_timeout_s: float | None = None
    max_pinned_fraction: float = 0.5
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        # A str subclass (or a Path) would make equal configurations unequal keys.
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError.for_value("model", self.model, "must be a model name or a path")
        if self.dtype not in _DTYPES:
            raise ConfigError.for_value("dtype", self.dtype, f"must be one of {', '.join(_DTYPES)}")
        if self.device not in _DEVICES:
            raise ConfigError.for_value("device", self.device, f"must be one of {', '.join(_DEVICES)}")
        if self.kernels not in _KERNELS:
            raise ConfigError.for_value("kernels", self.kernels, f"must be one of {', '.join(_KERNELS)}")
        for option in ("block_size", "long_prefill_token_threshold"):
            self._check_positive(option, getattr(self, option))
        for option in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
            "max_num_queued_reqs",
        ):
            if getattr(self, option) is not None:
                self._check_positive(option, getattr(self, option))
        for option in ("enforce_eager", "enable_prefix_caching"):
            if not isinstance(getattr(self, option), bool):
                raise ConfigError.for_value(option, getattr(self, option), "must be True or False")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise ConfigError.for_value("gpu_memory_utilization", share, "must be above 0 and at most 1")
        if (self.max_num_batched_tokens or math.inf) < (self.max_num_seqs or 0):
            raise ConfigError.for_value(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in every step",
            )
        self._check_memory_and_order()
        self._check_chat_template()
        for option, names in (("tool_call_parser", _TOOL_CALL_PARSERS), ("reasoning_parser", _REASONING_PARSERS)):
            if getattr(self, option) not in names:
                raise ConfigError.for_value(option, getattr(self, option), f"must be one of {', '.join(names)}")

    def _check_memory_and_order(self) -> None:
        if self.scheduling_policy not in _POLICIES:
            allowed = f"must be one of {', '.join(_POLICIES)}"
            raise ConfigError.for_value("scheduling_policy", self.scheduling_policy, allowed)
        if self.preemption_mode not in _PREEMPTION_MODES:
            allowed = f"must be one of {', '.join(_PREEMPTION_MODES)}"
            raise ConfigError.for_value("preemption_mode", self.preemption_mode, allowed)
        if not _is_number(self.swap_space) or self.swap_space < 0:
            raise ConfigError.for_value("swap_space", self.swap_space, "must be a number of GiB, 0 for none")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError.for_value("preemption_mode", "swap", "needs a swap_space above 0")
        if not _is_number(self.max_pinned_fraction) or not 0 <= self.max_pinned_fraction <= 1:
            raise ConfigError.for_value("max_pinned_fraction", self.max_pinned_fraction, "must be in [0, 1]")
        if not _is_number(self.max_itl_stretch) or self.max_itl_stretch <= 1:
            raise ConfigError.for_value("max_itl_stretch", self.max_itl_stretch, "must be a number above 1")
        if self.queue_timeout_s is not None and (not _is_number(self.queue_timeout_s) or self.queue_timeout_s <= 0):
            raise ConfigError.for_value("queue_timeout_s", self.queue_timeout_s, "must be a number above 0")

    def _check_chat_template(self) -> None:
        if isinstance(self.chat_template, os.PathLike):
            object.__setattr__(self, "chat_template", os.fspath(self.chat_template))
        if self.chat_template is not None and (not isinstance(self.chat_template, str) or not self.chat_template):
            raise ConfigError.for_value("chat_template", self.chat_template, "must be a path or a Jinja template")
        option, given = "chat_template_kwargs", self.chat_template_kwargs
        try:
            variables: dict[Any, Any] = dict(given)
        except (TypeError, ValueError) as error:
            raise ConfigError.for_value(option, given, "must be a mapping of names to JSON values") from error
        for name, value in variables.items():
            if not isinstance(name, str) or not name.isidentifier() or name in _TEMPLATE_NAMES:
                taken = ", ".join(sorted(_TEMPLATE_NAMES))
                raise ConfigError.for_value(option, name, f"must be a name, and none of {taken}")
            if not (
                value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
            ):
                raise ConfigError.for_value(
                    option, {name: value}, "a value must be a string, a number, True, False or None"
                )
        # Hashable, and the same for the same options: the configuration is a key.
        object.__setattr__(self, option, tuple(sorted(variables.items())))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping such as LangChain's ``engine_args``; an unknown option is an error that names it."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"unknown engine option {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**options)

    def step_limits(self, device_type: str) -> StepLimits:
        """The limits that were asked for; what was not is the device's default, fitted to the other one.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        default = _STEP_LIMITS[device_type]
        num_seqs = self.max_num_seqs or min(default.max_num_seqs, self.max_num_batched_tokens or math.inf)
        num_tokens = self.max_num_batched_tokens or max(default.max_num_batched_tokens, num_seqs)
        return StepLimits(max_num_seqs=int(num_seqs), max_num_batched_tokens=int(num_tokens))

    def lower_limits(self, limits: StepLimits, *, max_num_seqs: int, max_num_batched_tokens: int) -> StepLimits:
        """Limits lowered to others, at least 1 each, where they were not asked for."""
        num_tokens = self.max_num_batched_tokens
        if num_tokens is None:
            num_tokens = min(limits.max_num_batched_tokens, max(max_num_batched_tokens, self.max_num_seqs or 1))
        num_seqs = self.max_num_seqs or min(limits.max_num_seqs, max(max_num_seqs, 1), num_tokens)
        return StepLimits(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)

    @staticmethod
    def _check_positive(option: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError.for_value(option, value, "must be a whole number of at least 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
