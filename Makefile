# Everything runs in .venv, which any target makes on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format compare docs clean

demo: $(STAMP)
	$(BIN)/foretrain predict resnet50 --device h100 --batch 256 --precision amp-bf16 --samples 1281167 --epochs 90

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs_tools examples/recording.py
	$(BIN)/ruff format --check src tests benchmarks docs_tools examples/recording.py
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks docs_tools examples/recording.py
	$(BIN)/ruff format src tests benchmarks docs_tools examples/recording.py

# Forecasts of 500 jobs with another commit beside those of this one: make compare BASE=main
compare: $(STAMP)
	$(BIN)/python benchmarks/compare.py --base $(BASE)

# The documentation as a site, site/index.html: reference pages from the code, then all pages; without the network.
docs: $(STAMP)
	$(BIN)/python docs_tools/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site docs/reference .mypy_cache .pytest_cache .ruff_cache

# torch comes first and pinned: a looser requirement of another package would fetch a CUDA build of several GB.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)
