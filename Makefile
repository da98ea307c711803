# The environment is made once, in .venv, and made anew when its pins change.
#   make demo    build the first spec's module and verify it
#   make test    what a change must pass: no GPU needed
# PYTHON=python3.12 chooses the interpreter, TORCH_INDEX=<url> the package index that torch comes from.

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= auto

python := .venv/bin/python
install := $(python) -m pip install --quiet
ready := .venv/ready
older_triton := .triton36/ready

.PHONY: demo test test-all lint style golden check-golden clean

demo: $(ready)
	$(python) -m dsl build specs/decode.attn
	$(python) -m dsl verify specs/decode.attn

test: $(ready) $(older_triton) style check-golden
	$(python) -m pytest -n $(JOBS) -m "not gpu and not slow"
	PYTHONPATH=.triton36 $(python) -m pytest -n $(JOBS) -m "compile and not gpu and not slow"

test-all: $(ready) lint check-golden
	$(python) -m pytest -n $(JOBS) -m ""
	JOBS=$(JOBS) $(python) -m tests.compatibility pythons
	JOBS=$(JOBS) $(python) -m tests.compatibility tritons

lint: style
	$(python) -m pyright

style: $(ready)
	$(python) -m ruff check
	$(python) -m ruff format --check

check-golden: $(ready)
	$(python) -m dsl build --diff specs/*.attn

golden: $(ready)
	$(python) -m dsl build specs/*.attn
	$(python) -m dsl build specs/models/*.attn -o generated/models

clean:
	rm -rf .venv .triton36 .compat .pytest_cache .ruff_cache .hypothesis build dist

# Triton is installed apart, without its dependants' say: torch pins one version, and the kernels run on several.
$(ready): constraints.txt pyproject.toml
	test -x $(python) || $(PYTHON) -m venv .venv
	$(install) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(install) --no-deps "$$(grep '^triton==' constraints.txt)"
	$(install) $$(grep -Ev '^(torch|triton)==' constraints.txt)
	$(install) --no-deps --editable .
	touch $@

$(older_triton): $(ready)
	rm -rf .triton36
	$(install) --no-deps --target .triton36 triton==3.6.0
	touch $@
