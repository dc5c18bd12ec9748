# Quintet's tasks; plain `make` lists them. Keep to GNU make 3.81: it is what macOS ships.

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev train test lint lock clean
export PYTHON_CHECK

# The driver's folder is looked at first, since nvidia-smi takes seconds on some machines.
ifndef TORCH
TORCH := $(shell ls -A /proc/driver/nvidia/gpus 2>/dev/null | grep -q . && echo cuda \
	|| { nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo cuda || echo cpu; })
endif
ifeq ($(filter cpu cuda,$(TORCH)),)
$(error TORCH is '$(TORCH)'; it can be cpu or cuda)
endif
TORCH_VERSION := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)

# A stamp is the last thing that a set-up writes and the first that the next one removes, and bears the time at which
# its set-up began: what was interrupted, or overtaken by a newer lock, is done again, from an empty .venv.
READY := .venv/.ready-$(TORCH)
DEV_READY := .venv/.ready-dev
PIP_INSTALL := .venv/bin/python -m pip install -qq --require-hashes

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1 %\2/p' Makefile | while IFS=% read -r target what; do \
	  printf '%-16s %s\n' "$$target" "$$what"; \
	done
	@echo "Variables: ARGS='...' is passed on to train, test and lock; TORCH=cpu or cuda picks the build of torch"
	@echo "(now: $(TORCH)); PYTHON=... is the Python that .venv is made with."

setup: $(READY)  ## make .venv with the locked packages; train and test do it themselves

setup-dev: $(DEV_READY)  ## the same with the tools for development

train: $(READY)  ## train: make train ARGS='...'
	@.venv/bin/python -m recipes.train $(ARGS)

test: $(DEV_READY)  ## run the tests: make test ARGS='...'
	@.venv/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

lint: $(DEV_READY)  ## check style and types
	@.venv/bin/python -m ruff check
	@.venv/bin/python -m ruff format --check
	@.venv/bin/python -m mypy

lock: $(DEV_READY)  ## write the lock files anew; ARGS=--upgrade takes the newest versions
	@.venv/bin/python .ci/lock $(ARGS)

clean:  ## remove .venv and the tools' caches; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(READY): requirements.lock requirements-cpu.lock requirements-build.lock
	@$(FIND_PYTHON); \
	echo "making .venv with $$python, which is `$$python --version` ..."; \
	rm -f .venv/.ready-*; rm -rf .venv; mkdir .venv; touch .venv/.started; $$python -m venv .venv
	@$(PIP_INSTALL) -r requirements-build.lock
	@$(FIND_LOCK); \
	echo "installing `grep -c == $$lock` packages with torch $(TORCH_VERSION) ($$build) into .venv; minutes, but once ..."; \
	$(PIP_INSTALL) --no-build-isolation -r $$lock
	@mv .venv/.started $@

# Hiding $(READY) meanwhile makes an interrupted install start afresh: pip takes a half-installed package for whole.
$(DEV_READY): $(READY) requirements-dev.lock
	@touch .venv/.started; mv $(READY) .venv/.hidden
	@echo "installing `grep -c == requirements-dev.lock` packages for development into .venv ..."
	@$(PIP_INSTALL) --no-build-isolation -r requirements-dev.lock
	@mv .venv/.hidden $(READY); mv .venv/.started $@

define PYTHON_CHECK
import sys
version = "%d.%d" % sys.version_info[:2]
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    print("is Python " + version)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("is Python %s without venv (Debian, Ubuntu: apt install python%s-venv)" % (version, version))
    sys.exit(1)
endef

# Sets $$python, or ends with an error that says what was found.
FIND_PYTHON = set -e; python=; found=; \
	for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
	  if said=`$$candidate -c "$$PYTHON_CHECK" 2>/dev/null`; then python=$$candidate; break; fi; \
	  found="$$found; $$candidate $${said:-does not run}"; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Quintet needs Python 3.11, 3.12 or 3.13, but $${found\#; }." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python ..." >&2; \
	  exit 1; \
	fi

# Sets $$lock and $$build. pip's list of versions tells a missing CPU build from a network that fails: in the latter
# case either the plain version is missing too or pip says which address it could not fetch (404 is an answer).
FIND_LOCK = set -e; lock=requirements.lock; build="CUDA build"; \
	if [ `uname` = Darwin ]; then \
	  build="macOS build"; \
	elif [ $(TORCH) = cpu ]; then \
	  asked=`.venv/bin/python -m pip -vv index versions torch 2>&1` || true; \
	  versions=`echo "$$asked" | sed -n 's/^Available versions: \(.*\)/, \1,/p'`; \
	  failed=`echo "$$asked" | grep 'Could not fetch URL' | grep -v ': 404 '` || true; \
	  case "$$versions" in *", $(TORCH_VERSION),"*) plain=yes ;; *) plain= ;; esac; \
	  case "$$versions" in \
	  *", $(TORCH_VERSION)+cpu,"*) \
	    lock=requirements-cpu.lock; build="CPU build" ;; \
	  *) \
	    if [ -n "$$failed" ] || [ -z "$$plain" ]; then \
	      echo "pip finds no torch $(TORCH_VERSION) for this machine, or cannot reach its index. $$failed" >&2; \
	      exit 1; \
	    fi; \
	    echo "Note: the configured package index has no CPU build of torch $(TORCH_VERSION) for this Python."; \
	    echo "To get one, point pip at PyTorch's CPU index: the address under 'CPU' on PyTorch's Get Started page,"; \
	    echo "given as PIP_EXTRA_INDEX_URL. Going on with the CUDA build from requirements.lock, about 3 GB." ;; \
	  esac; \
	fi
