# Everything a newcomer needs: each target makes .venv and installs into it by itself.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# uv resolves and installs several times faster than pip; where it finds no packages, pip still may.
EXTRAS := '.[embedded,otel,dev]'

.PHONY: dev demo test check bench generate
.DEFAULT_GOAL := dev

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || { echo "Making .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing noetl-grpc and its tools into .venv (the first time takes about a minute)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	@$(BIN)/uv pip install --python $(BIN)/python --editable $(EXTRAS) \
	    || $(BIN)/python -m pip install --disable-pip-version-check --editable $(EXTRAS)
	@touch $@

dev: $(STAMP)  ## PostgreSQL, NATS, the server and its workers on loopback; Ctrl-C ends all
	@$(BIN)/noetl-grpc dev

demo: $(STAMP)  ## write sample executions into a running dev server and watch them flow
	@$(BIN)/noetl-grpc demo

test: $(STAMP)  ## all tests, against real servers
	$(BIN)/pytest -n auto --dist worksteal

check: $(STAMP)  ## linters, types, layers, protos, drift of generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python protos/breaking.py
	$(BIN)/hadolint Dockerfile
	$(BIN)/python protos/generate.py --check
	$(BIN)/python docs/generate.py --check

bench: $(STAMP)  ## every benchmark, small
	$(BIN)/noetl-grpc bench --quick

generate: $(STAMP)  ## protos -> generated/, and the pages of docs/ that follow from the code
	$(BIN)/python protos/generate.py
	$(BIN)/python docs/generate.py
