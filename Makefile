# Sandsea. `make demo` and `make test` do all of their own set-up on Debian 12.

# A test run that breaks off must fail, whatever reads its output.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

export GOTOOLCHAIN := go1.27.3
export GOFLAGS := -buildvcs=false
export CGO_ENABLED := 0
# A toolchain that tools/setup.sh fetched comes first, when there is one.
export PATH := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sandsea/$(GOTOOLCHAIN)/bin:$(PATH)

TOOL := tools/run.sh
PYTHON := build/venv/bin/python
VENV := build/venv/.ready
ADAPTORS := build/venv-adaptors/.ready
VERSION := 0.1.0+$(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
SKIPS := build/skips.txt

.PHONY: help setup build init demo newcomer test test-go test-python test-adaptors test-c fuzz verify fix generate clean \
	verify-format verify-vet verify-lint verify-arch verify-generated verify-api verify-licences verify-vulnerabilities \
	verify-python verify-c

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 34

setup: ## Install the Debian packages that are missing
	@tools/setup.sh

build: setup init ## Build build/sandsea
	@mkdir -p build
	go build -trimpath -ldflags "-s -w -X github.com/sandsea/sandsea/internal/version.release=$(VERSION)" -o build/sandsea ./cmd/sandsea

init: setup
	@$(MAKE) --no-print-directory -C init

demo: build $(VENV) ## The main job on real input: 64 rollouts, each graded in a fresh sandbox
	@PYTHONUNBUFFERED=1 $(PYTHON) -m demo --binary build/sandsea --out build/demo.json

newcomer: setup init ## What somebody does who has only the README: ten steps from a fresh clone, with builds and the demo
	@go run ./test/newcomer

test: build test-c test-go test-python test-adaptors ## All tests
	@tools/skips.sh $(SKIPS)

test-c: init
	@echo "test: sandsea-init"
	@$(MAKE) --no-print-directory -C init golden

test-go: build
	@echo "test: Go"
	@mkdir -p build
	go test -p 2 -timeout 20m -json ./... | go run ./test/testlog -skips $(SKIPS)

test-python: build $(VENV)
	@echo "test: Python"
	cd sdk/python && ../../$(PYTHON) -m pytest -q tests --ignore tests/adaptors
	$(PYTHON) -m pytest -q demo/tests

test-adaptors: build $(ADAPTORS) ## The adaptors of agent frameworks against the frameworks themselves
	@echo "test: adaptors"
	cd sdk/python && ../../build/venv-adaptors/bin/python -m pytest -q tests/adaptors

# The frameworks have many dependencies, so that they have an environment of their own.
$(ADAPTORS): sdk/adaptors-requirements.txt sdk/python/pyproject.toml
	@echo "setup: Python environment of the adaptors"
	@$$(tools/python312.sh) -m venv --clear build/venv-adaptors
	@build/venv-adaptors/bin/python -m pip install -q -r sdk/adaptors-requirements.txt -e sdk/python
	@touch $@

# The environment of the SDK's tests: the SDK itself, editable, and the pinned tools of sdk/requirements.txt.
$(VENV): sdk/requirements.txt sdk/python/pyproject.toml sdk/libdsec/pyproject.toml
	@echo "setup: Python environment"
	@python3 -m venv build/venv
	@build/venv/bin/python -m pip install -q -r sdk/requirements.txt -e sdk/python -e sdk/libdsec
	@touch $@

fuzz: init ## Run every fuzz target for FUZZTIME (10s)
	@test/fuzz.sh

verify: setup init $(VENV) verify-format verify-vet verify-lint verify-arch verify-generated verify-api verify-licences verify-vulnerabilities verify-python verify-c ## Everything that can be checked without running it
	@echo "verify: ok"

verify-format:
	@echo "verify: format"
	@out=$$($(TOOL) gofumpt -l $$(git ls-files -co --exclude-standard '*.go' | grep -v '\.pb\.go$$\|\.connect\.go$$')); \
		test -z "$$out" || { echo "$$out"; echo "not formatted: make fix"; exit 1; }

verify-vet:
	@echo "verify: vet"
	@go vet ./...

verify-lint:
	@echo "verify: staticcheck, golangci-lint"
	@$(TOOL) staticcheck ./...
	@$(TOOL) golangci-lint run --allow-parallel-runners ./...

verify-arch:
	@echo "verify: architecture"
	@go test -count=1 ./test/arch

verify-generated:
	@echo "verify: generated code is fresh"
	@tools/generate.sh --check

verify-api:
	@echo "verify: API"
	@cd api && ../$(TOOL) buf lint && ../$(TOOL) buf breaking --against baseline.binpb

verify-licences:
	@echo "verify: licences"
	@go run ./test/licences

verify-vulnerabilities:
	@echo "verify: known vulnerabilities"
	@tools/vulnerabilities.sh

verify-python:
	@echo "verify: ruff, mypy"
	@build/venv/bin/ruff check sdk demo examples && build/venv/bin/ruff format --check sdk demo examples
	@build/venv/bin/mypy --strict sdk/python/src sdk/libdsec/src demo examples

verify-c:
	@echo "verify: C"
	@$(MAKE) --no-print-directory -C init analyse

fix: setup $(VENV) ## Repair what can be repaired: formats, generated code
	@$(TOOL) gofumpt -w $$(git ls-files -co --exclude-standard '*.go' | grep -v '\.pb\.go$$\|\.connect\.go$$')
	@build/venv/bin/ruff check --fix -q sdk demo examples; build/venv/bin/ruff format -q sdk demo examples
	@tools/generate.sh

generate: setup ## Make the generated code anew
	@tools/generate.sh

clean: ## Remove what was built
	rm -rf build init/build
