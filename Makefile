# Two commands do everything on a fresh clone: `make run` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Processes that share the tests; each of them is one thread.
WORKERS ?= 2

# Flower wants an older rich than constraints.txt names, so it has an environment of its own.
FLOWER := .venv-flower

.PHONY: run test test-kernels test-deploy docs lint install clean
run: $(READY)
	$(BIN)/pfedlms compare

test: $(READY) lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# GPU kernels under Triton's interpreter, then whole runs on a pretended GPU; on a machine with a GPU `make test` runs all
# of them on it.
test-kernels: $(VENV)/.triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/sketch/test_sketch_gpu.py tests/pull/test_pull_gpu.py \
		tests/step/test_step_gpu.py tests/models/test_conv_gpu.py tests/wire/test_frames_gpu.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -p pretend_gpu --numprocesses $(WORKERS) tests/engine/test_gpu_code.py

$(VENV)/.triton: $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt triton
	touch $@

# Real processes on this machine, about half an hour.
test-deploy: $(FLOWER)/.ready
	PFEDLMS_TEST_DEPLOY=1 $(FLOWER)/bin/python -m pytest tests/flower

$(FLOWER)/.ready: pyproject.toml constraints.txt
	test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	grep -v -E '^(rich|cryptography)==' constraints.txt > $(FLOWER)/constraints.txt
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --quiet --constraint $(FLOWER)/constraints.txt \
		--editable '.[dev,simulation]'
	touch $@

# The site, built strictly: a broken link or a missing page is an error. `make docs` writes it to site/.
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY)

# The stamp is newer than both files as long as nothing has to be installed again.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev,report]'
	touch $@

clean:
	rm -rf $(VENV) $(FLOWER) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
