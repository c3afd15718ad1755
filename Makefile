# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

OUT    := .build
BIN    := $(OUT)/bin
PREFIX ?= /usr/local

GOFLAGS_SMALL := -ldflags "-s -w"
# The system's directories and the tools that hack/setup built: what the tests run.
TEST_ENV = GPUCKPT_BIN="$(abspath $(BIN)):$$(hack/setup --print-path)"

# go.work is for people; what is made here is made from each module's go.mod alone.
export GOWORK := off
# What was compiled and tested is then found in Go's cache wherever the tree is.
export GOFLAGS += -trimpath
MODULES := . agent integration bench

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show what there is to make.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Installs gcc where there is no C compiler.
.PHONY: compiler
compiler:
	@hack/compiler

.PHONY: build
build: compiler ## Build the shim, its helpers, CRIU's plugin, the interposer and the command line into .build/bin.
	@mkdir -p $(BIN)
	CGO_ENABLED=0 go build $(GOFLAGS_SMALL) -o $(BIN)/ ./cmd/containerd-shim-gpuckpt-v2 ./cmd/gpuckpt ./cmd/gpuckpt-tmpfs
	CGO_ENABLED=1 go build $(GOFLAGS_SMALL) -o $(BIN)/ ./cmd/gpuckpt-cuda-helper
	gcc -Wall -Wextra -Werror -O2 -fPIC -shared -fvisibility=hidden -s -o $(BIN)/gpuckpt_criu.so internal/criu/plugin/*.c
	@[ "$$(uname -m)" != x86_64 ] || $(MAKE) -s -C interposer OUT=$(abspath $(BIN))
	@ln -sf gpuckpt $(BIN)/cuda-checkpoint

# The same with the points at which a test makes faults; never installed.
.PHONY: build-faults
build-faults: build
	@mkdir -p $(BIN)/faults
	CGO_ENABLED=0 go build -tags faults $(GOFLAGS_SMALL) -o $(BIN)/faults/ ./cmd/containerd-shim-gpuckpt-v2 ./cmd/gpuckpt
	@cp $(BIN)/gpuckpt-cuda-helper $(BIN)/gpuckpt-tmpfs $(BIN)/gpuckpt_criu.so $(BIN)/faults/
	@[ "$$(uname -m)" != x86_64 ] || cp $(BIN)/libgpuckpt.so $(BIN)/faults/

# Code that runs in the processes of others, kept as it is embedded: a test compares.
internal/gpu/steer/copier/copier.bin: internal/gpu/steer/copier/copier.S
	gcc -c -o $(@:.bin=.o) $<
	objcopy -O binary -j .text $(@:.bin=.o) $@
	rm $(@:.bin=.o)

# A module of its own: Kubernetes' libraries stay out of the others.
.PHONY: agent
agent: ## Build the agent that does what Checkpoint objects ask for, and kubectl's plugin, into .build/bin.
	CGO_ENABLED=0 go -C agent build $(GOFLAGS_SMALL) -o $(abspath $(BIN))/gpuckpt-agent .
	CGO_ENABLED=0 go -C agent build $(GOFLAGS_SMALL) -o $(abspath $(BIN))/ ./kubectl-gpuckpt

.PHONY: install
install: build ## Install them into PREFIX/bin (default /usr/local).
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(addprefix $(BIN)/,containerd-shim-gpuckpt-v2 gpuckpt gpuckpt-cuda-helper) $(DESTDIR)$(PREFIX)/bin/
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/lib/gpuckpt $(BIN)/gpuckpt_criu.so $(BIN)/gpuckpt-tmpfs
	[ "$$(uname -m)" != x86_64 ] || install -m 755 -t $(DESTDIR)$(PREFIX)/lib/gpuckpt $(BIN)/libgpuckpt.so

.PHONY: setup
setup: compiler ## Get containerd, runc and CRIU in the pinned versions (cached, not installed).
	@hack/setup

# What only tests use: the software GPU and the programs that run on it.
.PHONY: testbeds
testbeds: compiler
	@mkdir -p $(BIN)/softcuda
	@$(MAKE) -s -C integration/softcuda OUT=$(abspath $(BIN))/softcuda
	@$(MAKE) -s -C integration/workload OUT=$(abspath $(BIN))

.PHONY: demo
demo: setup build testbeds ## Checkpoint and restore a GPU container with an unmodified ctr.
	go -C integration build -o $(abspath $(BIN))/demo ./demo
	@$(TEST_ENV) exec $(BIN)/demo

# Packages whose tests need root or a C compiler, or take long; all others are part of `make quick`.
NOT_QUICK = cmd/gpuckpt cuda cuda/driver images/oci images/sign internal/criu internal/criu/image internal/criu/pages \
	internal/criu/tmpfs internal/gpu/interposer internal/gpu/ptrace internal/gpu/staging internal/gpu/steer internal/guard/trust \
	internal/node/host internal/node/mmapfile runtime/internal/devnode runtime/internal/gpustate runtime/internal/hooks

# What a developer runs between two edits. Go finds in its cache what has not changed.
.PHONY: quick
quick: ## Build and vet all modules, lint the product, and run the tests that need neither root nor a C compiler.
	@hack/setup golangci-lint
	@for module in $(MODULES); do echo "build, vet $$module"; (cd $$module && go build -o /dev/null ./... && go vet ./...); done
	@"$$(hack/setup --print-path)"/golangci-lint run ./...
	@module=$$(go list -m); go list ./... | grep -vxF "$$(printf "$$module/%s\n" $(NOT_QUICK))" | xargs go test -vet=off

.PHONY: test
test: setup setup-kubernetes build-faults agent testbeds ## Run all tests (needs root).
	@hack/setup imagetools skopeo cosign pyzmq gotestsum zdtm
	$(TEST_ENV) hack/test

# Every fault at every step (integration/faults); `make test` tries a sample. What was tried is noted
# in WALK, and a run goes on where the last one was cut off, until the programs are others.
# PART=2/3 is the second of three parts, LANES=3 uses three containers at once. KNOWN is the log of an
# earlier walk, whose cells are left out where they passed, with whatever programs.
WALK ?= $(OUT)/faults-walk.txt
.PHONY: test-faults
test-faults: setup build-faults testbeds ## Make every fault at every step (needs root; an hour or more).
	$(TEST_ENV) GPUCKPT_TEST_FAULTS=all GPUCKPT_TEST_FAULTS_WALK="$(abspath $(WALK))" GPUCKPT_TEST_FAULTS_PART=$(PART) \
		GPUCKPT_TEST_FAULTS_LANES=$(LANES) GPUCKPT_TEST_FAULTS_KNOWN="$(if $(KNOWN),$(abspath $(KNOWN)))" go -C integration test -count=1 -timeout 24h ./faults

# SOAK is how long; `make test` tries two short rounds. Results: GPUCKPT_RESULTS names a file.
SOAK ?= 1h
.PHONY: soak
soak: setup build testbeds ## Checkpoint, restore and suspend 20 containers at once, for an hour (needs root).
	$(TEST_ENV) GPUCKPT_TEST_SOAK=$(SOAK) go -C integration test -count=1 -timeout 24h -v ./soak
	$(TEST_ENV) GPUCKPT_TEST_SOAK=$(SOAK) GPUCKPT_TEST_CYCLES=200 go -C integration test -count=1 -timeout 24h -v \
		-run 'TestPowerLost|TestManyCheckpoints|TestManyRestores' ./checkpoint

# What the tests of pods and of nerdctl need: a cluster's programs, older containerds.
.PHONY: setup-kubernetes
setup-kubernetes: compiler
	@hack/setup kubernetes crictl cni iptables iproute2 nerdctl imagetools containerd-2.2 containerd-2.3

# Part of `make test`.
.PHONY: test-kubernetes
test-kubernetes: setup setup-kubernetes build agent testbeds ## Run the tests with a kubelet, crictl and nerdctl.
	$(TEST_ENV) GPUCKPT_TEST_RESTARTS=all GPUCKPT_TEST_PODS=all go -C integration test -p 1 -count=1 -timeout 30m ./kubernetes ./nerdctl

# An older containerd in place of the pinned one: CONTAINERD=2.2 or 2.3. `make test` tries pods with each.
# Skipped is what tries each itself, and what runs runc's shim, which is the newest's: 2.2 cannot start that.
CONTAINERD ?= 2.2
.PHONY: test-containerd
test-containerd: setup setup-kubernetes build agent testbeds ## Run the tests of stock clients with an older containerd: CONTAINERD=2.2.
	@mkdir -p $(OUT)/containerd-$(CONTAINERD)
	@for program in containerd ctr; do ln -sf "$$(hack/setup --print-path)/$$program-$(CONTAINERD)" $(OUT)/containerd-$(CONTAINERD)/$$program; done
	GPUCKPT_BIN="$(abspath $(BIN)):$(abspath $(OUT))/containerd-$(CONTAINERD):$$(hack/setup --print-path)" \
		go -C integration test -p 1 -count=1 -timeout 60m -skip '^Test(Older|Configurations$$|DaemonSet$$|Journey$$)' \
		./checkpoint ./suspend ./registry ./nerdctl ./kubernetes

# hack/setup gets no dockerd: DOCKER is the directory of one, and of docker.
DOCKER ?= /usr/bin
.PHONY: test-docker
test-docker: setup build testbeds ## Run the tests with a dockerd (needs root): DOCKER=DIR.
	GPUCKPT_BIN="$(abspath $(BIN)):$(DOCKER):$$(hack/setup --print-path)" go -C integration test -count=1 -timeout 10m ./docker

# Part of `make test`.
.PHONY: test-sanitized
test-sanitized: compiler ## Run the interposer's tests by ThreadSanitizer, and by AddressSanitizer with UBSan.
	for sanitizer in thread address,undefined; do GPUCKPT_SANITIZER=$$sanitizer go test -count=1 -run '^TestLibrary$$' ./internal/gpu/interposer || exit 1; done

.PHONY: test-pairings
test-pairings: setup build testbeds ## Move GPU memory every way there and back, of which make test has a third (needs root; minutes).
	$(TEST_ENV) GPUCKPT_TEST_PAIRINGS=all go -C integration test -count=1 -v -timeout 60m ./registry -run TestPairings

# Part of `make test`, which tries a sample, by this shim alone. TESTS="fd01 socket-tcp" runs these. Results
# go to ZDTM, and a run goes on where the last one was cut off. docs/internals/change-it.md says how to publish them.
ZDTM  ?= $(OUT)/zdtm.jsonl
TESTS ?= all
.PHONY: test-zdtm
test-zdtm: setup build testbeds ## Run CRIU's own suite by runc's shim and by this one (needs root; an hour).
	@hack/setup zdtm
	$(TEST_ENV) GPUCKPT_TEST_ZDTM="$(TESTS)" GPUCKPT_TEST_ZDTM_LOG="$(abspath $(ZDTM))" go -C integration test -count=1 -timeout 6h ./zdtm

# Part of `make test`, which tries a sample, by this shim alone. SERVERS="redis,nginx" runs these. LANES is
# how many at once. Results as above. What Debian's packages need lies in the cache of hack/setup: 2 GB.
SERVERS         ?= all
SERVERS_RESULTS ?= $(OUT)/servers.jsonl
.PHONY: test-servers
test-servers: setup build testbeds ## Run servers of Debian's packages by runc's shim and by this one (needs root; an hour).
	$(TEST_ENV) GPUCKPT_TEST_SERVERS="$(SERVERS)" GPUCKPT_TEST_SERVERS_LOG="$(abspath $(SERVERS_RESULTS))" \
		go -C integration test -count=1 -v -timeout 6h -parallel $(or $(LANES),2) ./servers

# Part of `make test`, which tries a sample. CHANGES=8:3 tries every eighth change, from the fourth on.
CHANGES ?= all
.PHONY: test-hostile
test-hostile: setup build testbeds ## Restore every change of every field of a checkpoint and of an image (needs root; hours).
	$(TEST_ENV) GPUCKPT_HOSTILE=$(CHANGES) go -C integration test -count=1 -v -timeout 240m ./hostile -run 'TestEveryField|TestEachRule'

.PHONY: gpu-bundle
gpu-bundle: setup build-faults ## Pack the tests into one archive for a machine with a GPU.
	hack/bundle

.PHONY: gpu-bundle-kubernetes
gpu-bundle-kubernetes: setup setup-kubernetes build agent ## The same for the tests with a kubelet and nerdctl.
	hack/bundle kubernetes

# The corpus of earlier runs, in .build/fuzz-results, is where it goes on.
.PHONY: fuzz
fuzz: ## Fuzz all targets (needs root): FUZZFLAGS="--seconds 600 --part 1/4".
	@hack/fuzz-build
	$(OUT)/fuzz/fuzz --out $(OUT)/fuzz-results $(FUZZFLAGS)

.PHONY: fuzz-bundle
fuzz-bundle: ## Pack the fuzz targets into one archive for a larger machine.
	hack/fuzz-build bundle

# KEY is an Ed25519 private key in PEM to sign with.
.PHONY: release
release: setup ## Build a release into dist/: VERSION=1.2.3 [KEY=FILE].
	@hack/release/build "$(or $(VERSION),$(error VERSION is not set: make release VERSION=1.2.3))" dist $(KEY)

# A release that is built twice, and installed, tried and removed on clean roots.
.PHONY: test-release
test-release: setup ## Build a release of this tree and test it on clean roots (needs root; minutes).
	@mkdir -p $(OUT)/test-release
	@openssl genpkey -algorithm ed25519 -out $(OUT)/test-release/key.pem
	@openssl pkey -in $(OUT)/test-release/key.pem -pubout -out $(OUT)/test-release/public.pem
	@hack/release/build 0.0.1 $(OUT)/test-release/dist $(OUT)/test-release/key.pem
	@source hack/packages.bash && install_packages rpm qemu-user-static >&2
	GPUCKPT_DIST="$(abspath $(OUT))/test-release/dist" GPUCKPT_VERSION=0.0.1 GPUCKPT_PUBLIC_KEY="$(abspath $(OUT))/test-release/public.pem" \
		go -C hack/release test -count=1 -timeout 60m -v ./whole
	$(MAKE) -s setup-kubernetes build agent testbeds
	@hack/setup helm skopeo
	$(TEST_ENV) GPUCKPT_NODE_IMAGE="$(abspath $(OUT))/test-release/dist/gpuckpt-node-0.0.1.oci.tar" \
		GPUCKPT_CHART="$(abspath $(OUT))/test-release/dist/gpuckpt-chart-0.0.1.tgz" \
		go -C integration test -count=1 -v ./kubernetes -run 'TestDaemonSet$$'

# VM is where the logs go.
VM ?= $(OUT)/vm/log
.PHONY: test-vm
test-vm: setup ## Install, try and remove a release on a stock node, a virtual machine (needs root; minutes once built).
	@hack/setup crictl cni nerdctl
	@mkdir -p $(OUT)/vm
	@ARCHES=amd64 hack/release/build 0.0.1 $(OUT)/vm/dist
	hack/vm/run $(OUT)/vm/dist $(VM)

# What was seen to pass there: the formats of checkpoints. What steers, traces or talks to the kernel is for
# a real machine. The emulator does not tell the address of a SIGBUS, which the test that is left out causes.
ARM64_PACKAGES = $(addprefix ./images/,. archive arriving capture convert crypt feed layout)
.PHONY: test-arm64
test-arm64: ## Run the unit tests of arm64 in emulation (needs root for the emulator; minutes).
	@source hack/packages.bash && install_packages qemu-user-static >&2
	CGO_ENABLED=0 GOARCH=arm64 go test -exec qemu-aarch64-static -timeout 30m -skip TestCheckInMemoryCutShort $(ARM64_PACKAGES)

# What a node gets: unpacked at its root, it restarts nothing.
.PHONY: package
package: build ## Pack what a node needs into .build/gpuckpt.tar.gz.
	rm -rf $(OUT)/package
	$(MAKE) -s install DESTDIR=$(abspath $(OUT))/package
	install -D -m 644 deploy/containerd.toml $(OUT)/package/etc/containerd/conf.d/gpuckpt.toml
	tar -C $(OUT)/package --sort=name --owner=0 --group=0 --numeric-owner -czf $(OUT)/gpuckpt.tar.gz .

.PHONY: compatibility
compatibility: ## Write docs/compatibility.md out of docs/results.
	go -C integration run ./compatibility

.PHONY: reference
reference: ## Write docs/reference.md out of the code.
	go test -count=1 -run '^TestReference$$' ./cmd/gpuckpt -args -write

.PHONY: faults-page
faults-page: ## Write docs/internals/faults.md out of the table of faults.
	go -C integration run ./faults/page

.PHONY: zdtm-page
zdtm-page: ## Write docs/internals/zdtm.md out of the last results of CRIU's suite.
	go -C integration run ./zdtm/page

.PHONY: servers-page
servers-page: ## Write docs/internals/servers.md out of the last results of servers.
	go -C integration run ./servers/page

.PHONY: bench-build
bench-build: setup build testbeds
	go -C bench build $(GOFLAGS_SMALL) -o $(abspath $(BIN))/bench .

.PHONY: bench
bench: bench-build ## Measure the overhead with the software GPU, beside the peers.
	@$(TEST_ENV) GPUCKPT_GPU=software exec $(BIN)/bench --out $(OUT)/bench --budget 180 --runs 3 \
		--sizes 16MiB,64MiB,256MiB --procs 1,2,4 --procs-sizes 16MiB --plain --images $(BENCHFLAGS)

# Hours; BENCHFLAGS chooses less ("--methods ours,criugpu --sizes 16GiB"), and
# what does not fit the machine is left out.
.PHONY: bench-gpu
bench-gpu: bench-build ## Measure real sizes on this machine's GPUs, beside the peers.
	@$(TEST_ENV) GPUCKPT_GPU=real exec $(BIN)/bench --out $(OUT)/bench-gpu --budget 36000 \
		--sizes 1GiB,8GiB,16GiB,32GiB,64GiB --procs 1,2,4 --procs-sizes 16GiB --content pattern,zero,weights \
		--media tmpfs,disk --disk-dir $(abspath $(OUT)) --modes exit,leave --plain --images --limit-case --write-through $(BENCHFLAGS)

.PHONY: rooms
rooms: ## Print each package's size and imports; fail where a wall is down.
	@go run ./hack/rooms

SCRIPTS = .ci/run $(addprefix hack/release/,build clean-root whole/in-root) $(addprefix hack/vm/,base guest run) $(addprefix hack/,bundle bundle-criu bundle-run bundle-zmq compiler criu-source fuzz-build fuzz-run server-root setup test versions) \
	$(wildcard hack/*.bash hack/recipes/*.bash)

# Without -trimpath: with it Go's cache gives golangci-lint the C parts of a package
# as another clone made them, by paths that may be gone.
lint quick: export GOFLAGS := $(filter-out -trimpath,$(GOFLAGS))

.PHONY: lint
lint: rooms ## Run rooms, go mod tidy, go vet and golangci-lint on each module, shellcheck and actionlint on scripts and workflows.
	@hack/setup golangci-lint shellcheck actionlint
	@tools=$$(hack/setup --print-path); for module in $(MODULES); do \
		echo "lint $$module"; \
		(cd $$module && go mod tidy -diff && go vet ./... && "$$tools"/golangci-lint run ./...); \
	done; \
	echo "lint scripts"; "$$tools"/shellcheck -x $(SCRIPTS); \
	echo "lint workflows"; "$$tools"/actionlint

# A requirement that the product gains or loses shows in the modules that import it.
.PHONY: tidy
tidy: ## Bring go.mod and go.sum of each module up to date.
	@for module in $(MODULES); do (cd $$module && go mod tidy); done

.PHONY: clean
clean: ## Remove what was built here (not the cache of tools).
	rm -rf $(OUT)
