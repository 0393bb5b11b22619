# make check       judge the shipped reference (sets .venv up first)
# make test        the suite's own tests
# make faults      a fault for every known mistake: each must be rejected
# make lint        style and types
# make aot         every kernel compiled for every GPU target and its memory traffic counted, without a GPU: ci/aot/;
#                  AOT="sm_90 traffic" for some
# make ports       install what others publish, each in its own environment, and judge it (docs/ports.md)
# make setup       only the virtual environment
# make report      judge TARGET; report/ then holds JSON lines, JUnit, HTML and a badge
# make shard       one part of the full level, SHARD=1/4; `make merge` puts the parts in report/ together
# make nightly     what takes long: every fault against the full level, and the honest variants
# make mutate      mutants of the formats and the judge, each of which a test must notice
#
# TARGET is what is judged: `make report TARGET=my_port:Port`.
# PYTHON is the interpreter that .venv is made from: `make check PYTHON=/env/bin/python`.  Remove .venv to change it.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

TARGET ?= reference
SHARD ?= 1/1
OUT := report
CONFORMANCE := $(VENV)/bin/conformance

.PHONY: setup check test faults lint report shard merge nightly mutate ports aot
.DELETE_ON_ERROR:

setup: $(READY)

# Where PYTHON already has torch, that build is used: it may be the only one that fits the machine's accelerator, and
# it is large.  --system-site-packages shows the packages of an installed Python, but not those of a virtual
# environment, so the folder that holds torch is also named in a .pth file.
# Elsewhere torch is pinned, since this version resolves to a CPU build on the machines used for development, while a
# range may fetch a CUDA build of several gigabytes.
# The build backend is installed beside the rest rather than into an isolated environment: quicker, and no download
# where PYTHON has it.
$(READY): pyproject.toml
	@set -e; torch=$$($(PYTHON) -c 'import importlib.util as u, pathlib; s = u.find_spec("torch"); \
	    print(pathlib.Path(s.origin).parents[1] if s else "")'); \
	if [ -n "$$torch" ]; then \
	    echo "setup: using torch of $$torch"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV); \
	    echo "$$torch" > "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-python.pth"; \
	else \
	    echo "setup: installing torch"; \
	    $(PYTHON) -m venv $(VENV); \
	    $(RUN) -m pip install --quiet torch==2.13.0; \
	fi
	@$(RUN) -m pip install --quiet 'setuptools>=77'
	@$(RUN) -m pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@

check: setup
	$(VENV)/bin/conformance check reference --jobs 2

test: setup
	$(RUN) -m pytest -n auto

faults: setup
	$(VENV)/bin/conformance faults --quick

lint: setup
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

# The badge is written whatever the verdict is; the exit code is that of the check.
report: setup
	@mkdir -p $(OUT)
	$(CONFORMANCE) check $(TARGET) --json $(OUT)/report.jsonl --junit $(OUT)/report.xml --html $(OUT)/report.html; \
	    code=$$?; $(CONFORMANCE) badge $(OUT)/report.jsonl --out $(OUT)/badge.json; exit $$code

shard: setup
	@mkdir -p $(OUT)
	$(CONFORMANCE) check $(TARGET) --level full --shard $(SHARD) --json $(OUT)/shard-$(subst /,-of-,$(SHARD)).jsonl

merge: setup
	$(CONFORMANCE) merge $(OUT)/shard-*.jsonl --json $(OUT)/report.jsonl --junit $(OUT)/report.xml

nightly: setup
	$(CONFORMANCE) faults
	$(CONFORMANCE) faults --honest

mutate: setup
	$(RUN) -m mutmut run
	$(RUN) -m mutmut results

aot: setup
	$(RUN) ci/aot/gate.py $(AOT) $(UPDATE)

# Their packages go to .venv-ports/, one environment each; PORT=mlx-lm for one of them.
ports: setup
	$(RUN) -m conformance.ports.run $(PORT)
