# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

OUT    := .build
BIN    := $(OUT)/bin
PREFIX ?= /usr/local
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

GOFLAGS_SMALL := -trimpath -ldflags "-s -w -X main.version=$(VERSION)"
# The system's directories and the tools that hack/setup built: what the tests run.
TEST_ENV = GPUCKPT_BIN="$(abspath $(BIN)):$$(hack/setup --print-path)"

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show what there is to make.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: build
build: ## Build the shim, the CUDA helper and the command line into .build/bin.
	@mkdir -p $(BIN)
	CGO_ENABLED=0 go build $(GOFLAGS_SMALL) -o $(BIN)/ ./cmd/containerd-shim-gpuckpt-v2 ./cmd/gpuckpt
	CGO_ENABLED=1 go build $(GOFLAGS_SMALL) -o $(BIN)/ ./cmd/gpuckpt-cuda-helper
	@ln -sf gpuckpt $(BIN)/cuda-checkpoint

.PHONY: install
install: build ## Install them into PREFIX/bin (default /usr/local).
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(addprefix $(BIN)/,containerd-shim-gpuckpt-v2 gpuckpt gpuckpt-cuda-helper) $(DESTDIR)$(PREFIX)/bin/

.PHONY: setup
setup: ## Get containerd, runc and CRIU in the pinned versions (cached, not installed).
	@hack/setup

# What only tests use: the software GPU and the programs that run on it.
.PHONY: testbeds
testbeds:
	@mkdir -p $(BIN)/softcuda
	@$(MAKE) -s -C integration/softcuda OUT=$(abspath $(BIN))/softcuda
	@$(MAKE) -s -C integration/workload OUT=$(abspath $(BIN))

.PHONY: demo
demo: setup build testbeds ## Checkpoint and restore a GPU container with an unmodified ctr.
	@$(TEST_ENV) go run ./integration/demo

.PHONY: test
test: setup build testbeds ## Run all tests (needs root).
	$(TEST_ENV) hack/test

.PHONY: lint
lint: ## Run gofmt, go vet and golangci-lint.
	@hack/setup golangci-lint
	go vet ./...
	$$(hack/setup --print-path)/golangci-lint run ./...

.PHONY: clean
clean: ## Remove what was built here (not the cache of tools).
	rm -rf $(OUT)
