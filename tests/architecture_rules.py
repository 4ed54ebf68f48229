"""Who may import whom: the tables that test_architecture.py enforces."""

from __future__ import annotations

CONTRACT = ("pagedllm.api", "pagedllm.config", "pagedllm.errors")

# Room -> what of this project it may import, besides itself. The arrows only point down: no line names one above it.
# A room is a module or a package with all below it, except "pagedllm", which stands for its __init__.py alone.
# A line may name a single class where the rest of a module is out of bounds.
ARROWS: dict[str, tuple[str, ...]] = {
    "pagedllm.errors": (),
    "pagedllm.config": ("pagedllm.errors",),
    "pagedllm.sampling_params": ("pagedllm.errors",),
    "pagedllm.message": ("pagedllm.errors", "pagedllm.sampling_params"),
    "pagedllm.hints": ("pagedllm.errors", "pagedllm.sampling_params"),
    "pagedllm.output_format": ("pagedllm.errors", "pagedllm.sampling_params"),
    "pagedllm.generate_request": (
        *("pagedllm.errors", "pagedllm.hints", "pagedllm.message", "pagedllm.output_format"),
        "pagedllm.sampling_params",
    ),
    "pagedllm.api": (
        *("pagedllm.errors", "pagedllm.generate_request", "pagedllm.hints", "pagedllm.message"),
        *("pagedllm.output_format", "pagedllm.sampling_params"),
    ),
    "pagedllm.logs": ("pagedllm.errors",),
    "pagedllm": (*CONTRACT, "pagedllm.logs"),
    "pagedllm_kernels": (),
    "pagedllm.files": ("pagedllm.errors",),
    "pagedllm.control": CONTRACT,
    "pagedllm.text": (*CONTRACT, "pagedllm.files"),
    "pagedllm.compute": (
        *CONTRACT,
        "pagedllm.files",
        "pagedllm_kernels",
        # Control's data, never its policy.
        "pagedllm.control.sequence.Sequence",
        "pagedllm.control.host_tier.BlockCopy",
    ),
    "pagedllm.constraints": (
        *("pagedllm.compute.bitmask", "pagedllm.compute.sampler"),
        *("pagedllm.control.sequence", "pagedllm.text.grammar"),
    ),
    "pagedllm.core": (*CONTRACT, "pagedllm.constraints", "pagedllm.control", "pagedllm.compute", "pagedllm.text"),
    "pagedllm.streams": ("pagedllm.api", "pagedllm.assemble", "pagedllm.errors"),
    "pagedllm.worker": (
        "pagedllm.api",
        "pagedllm.errors",
        "pagedllm.control.sequence",
        "pagedllm.core",
        "pagedllm.streams",
    ),
    "pagedllm.intake": (*CONTRACT, "pagedllm.control.sequence", "pagedllm.files", "pagedllm.text"),
    # Builds an engine from its parts.
    "pagedllm.local": (
        *(*CONTRACT, "pagedllm.assemble", "pagedllm.compute", "pagedllm.control", "pagedllm.core", "pagedllm.files"),
        *("pagedllm.intake", "pagedllm.streams", "pagedllm.text", "pagedllm.worker"),
    ),
    "pagedllm.remote": (*CONTRACT, "pagedllm.wire"),
    "pagedllm.registry": CONTRACT,
    "pagedllm.wire": (*CONTRACT, "pagedllm.hints", "pagedllm.message", "pagedllm.sampling_params"),
    # Any engine will do; of the core only what it tells about its steps.
    "pagedllm.bench": (*CONTRACT, "pagedllm.core.StepRecord"),
    "pagedllm.bench.serving": (*CONTRACT, "pagedllm.bench.datasets", "pagedllm.wire"),
    "pagedllm.bench.serving_report": (*CONTRACT, "pagedllm.bench.serving"),
    # Runs the real scheduler and router, without model, thread and network.
    "pagedllm.bench.router": (
        *(*CONTRACT, "pagedllm.cluster.routing", "pagedllm.control", "pagedllm.core.StepRecord"),
    ),
    # Starts real replicas.
    "pagedllm.bench.router.live": (
        *(*CONTRACT, "pagedllm.cluster.config", "pagedllm.cluster.run", "pagedllm.server.config"),
    ),
    "pagedllm.assemble": ("pagedllm.api", "pagedllm.errors"),
    # Any engine will do.
    "pagedllm.server": (*CONTRACT, "pagedllm.assemble", "pagedllm.wire"),
    # Policy, without Ray: also what the simulation runs.
    **dict.fromkeys(("pagedllm.cluster.prefix_index", "pagedllm.cluster.routing"), ("pagedllm.cluster.prefix_index",)),
    # The same server over an engine that is many.
    "pagedllm.cluster": (
        *(*CONTRACT, "pagedllm.assemble", "pagedllm.control.block_hash", "pagedllm.control.kv_events"),
        *("pagedllm.files", "pagedllm.intake", "pagedllm.registry", "pagedllm.server", "pagedllm.streams"),
        "pagedllm.text",
    ),
    # Builds an engine of timed parts, and measures single parts as bounds: it has to know what is inside.
    **dict.fromkeys(
        ("pagedllm.bench.bounds", "pagedllm.bench.parts", "pagedllm.bench.roofline"),
        (
            *(*CONTRACT, "pagedllm.bench", "pagedllm.compute", "pagedllm.control", "pagedllm.core", "pagedllm.files"),
            *("pagedllm.streams", "pagedllm.text", "pagedllm.worker", "pagedllm_kernels"),
        ),
    ),
    # Drives the parts of an engine themselves, without text and thread.
    **dict.fromkeys(
        (
            "pagedllm.bench.gpu_check",
            "pagedllm.bench.gpu_kernels",
            "pagedllm.bench.gpu_parity",
            "pagedllm.bench.gpu_workloads",
        ),
        (*CONTRACT, "pagedllm_kernels", "pagedllm.bench", "pagedllm.compute", "pagedllm.control", "pagedllm.files"),
    ),
    # Drives a scheduler without a model.
    "pagedllm.bench.scheduler_cost": (*CONTRACT, "pagedllm.control"),
    "pagedllm.cli": (
        *(*CONTRACT, "pagedllm.bench", "pagedllm.files", "pagedllm.logs", "pagedllm.registry"),
        *("pagedllm.cluster.config", "pagedllm.server.auth", "pagedllm.server.config"),
        # Plans an engine with the engine's own arithmetic.
        *("pagedllm.compute.models.config", "pagedllm.compute.planning", "pagedllm.compute.model_runner.resolve_dtype"),
    ),
    "langchain_pagedllm": CONTRACT,
}

# Room -> what it may import from other distributions: nothing where there is no line. The standard library is free.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "pagedllm_kernels": ("torch",),
    "pagedllm_kernels.triton": ("torch", "triton"),
    "pagedllm.files": ("numpy",),
    "pagedllm.files.hub": ("huggingface_hub",),
    "pagedllm.text": ("jinja2", "llguidance", "numpy", "tokenizers", "transformers"),
    "pagedllm.compute": ("gguf", "numpy", "safetensors", "torch"),
    "pagedllm.constraints": ("llguidance", "torch"),
    "pagedllm.core": ("torch",),
    "pagedllm.remote": ("httpx", "httpx_sse"),
    "pagedllm.bench": ("numpy",),
    "pagedllm.bench.serving": ("httpx", "httpx_sse", "numpy"),
    "pagedllm.bench.router.live": ("httpx", "numpy"),
    "pagedllm.bench.serving_report": ("matplotlib", "numpy"),
    **dict.fromkeys(("pagedllm.bench.bounds", "pagedllm.bench.parts"), ("torch",)),
    **dict.fromkeys(
        (
            "pagedllm.bench.gpu_check",
            "pagedllm.bench.gpu_kernels",
            "pagedllm.bench.gpu_parity",
            "pagedllm.bench.gpu_workloads",
        ),
        ("numpy", "torch", "transformers"),
    ),
    "pagedllm.bench.plot": ("matplotlib",),
    "pagedllm.server": ("fastapi", "prometheus_client", "starlette", "uvicorn"),
    "pagedllm.cluster": ("fastapi", "ray"),
    "pagedllm.cli": ("huggingface_hub", "tomli", "torch", "typer"),
    "langchain_pagedllm": ("langchain_core", "pydantic", "typing_extensions"),
    "langchain_pagedllm.middleware": ("langchain", "langchain_core", "langgraph"),
    "langchain_pagedllm.registration": ("langchain",),
    "langchain_pagedllm.profiles": ("tomli",),  # before Python 3.11
}

# The only imports inside functions: what they name is heavy or optional, and not every process needs it.
LAZY_DOORS: dict[str, tuple[str, ...]] = {
    "langchain_pagedllm.registration": ("langchain",),
    "langchain_pagedllm": ("pagedllm.registry", "pagedllm.local", "pagedllm.remote", "pagedllm.files"),
    "pagedllm": ("pagedllm.registry",),
    "pagedllm.bench.plot": ("matplotlib",),
    "pagedllm.files.hub": ("huggingface_hub",),
    "pagedllm.text.guidance": ("llguidance",),
    "pagedllm.bench.serving_report": ("matplotlib",),
    "pagedllm.compute.weights": ("pagedllm.compute.weights.gguf",),
    "pagedllm_kernels.registry": ("pagedllm_kernels.triton",),
    "pagedllm.registry": ("pagedllm.local", "pagedllm.core.StepRecord"),
    "pagedllm.cluster": ("pagedllm.cluster.arguments",),
    "pagedllm.cli": (
        *("huggingface_hub", "pagedllm.bench", "pagedllm.cli", "pagedllm.compute", "pagedllm.core", "pagedllm.local"),
        *("pagedllm.cluster.run", "pagedllm.server.config", "pagedllm.server.metrics", "pagedllm.server.run", "torch"),
    ),
}
COMPUTED_IMPORTS = ("langchain_pagedllm",)  # loads what its own table of public names says, at first use
