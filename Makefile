# `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Tools are built once and shared by all checkouts.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/partage
TOOLS := $(CACHE)/tools
DENY_VERSION := 0.20.2
FUZZ_VERSION := 0.13.2
CYCLONEDX_VERSION := 0.5.9
TYPOS_VERSION := 1.51.1
FUZZ_TARGETS = $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
FUZZ_SECONDS ?= 60
# Inputs of these targets are sequences of calls, five bytes each: with libFuzzer's length control, inputs stay at two
# calls for minutes.
FUZZ_LONG_INPUT_TARGETS = driver_calls

# If set, images are built with the newest packages instead of the downloaded ones.
FRESH ?=

TRACE := traces/openb
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
PARTAGE := $(RELEASE)/partage
DIST := $(TARGET)/dist
SHIM := $(TARGET)/portable/libpartage_shim.so

# Built as a part of the workspace, so that its dependencies have the same features as for the tests, and are built once.
XTASK := cargo build --quiet --workspace --bin partage-xtask && "$(TARGET)/debug/partage-xtask"

.PHONY: help run replay readme-image test test-unit lint audit bench bench-compute bench-node fuzz soak binaries shim cluster cluster-down image release \
  manifests toolchain

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/' | expand -t 20

run: toolchain ## share two GPUs between three programs for a minute; without a GPU, simulated ones
	cargo build --release --package partage --package partage-samples --package partage-sim-driver --package partage-shim
	@PATH="$$(cd "$(RELEASE)" && pwd):$$PATH" partage up --start examples/workloads.yaml --for 60s

replay: toolchain ## replay a production trace under every policy and compare
	cargo build --release --package partage
	"$(PARTAGE)" replay --nodes $(TRACE)/openb_node_list_gpu_node.csv --pods $(TRACE)/openb_pod_list_default.csv \
	  --compare --plot target/compare.svg
	@echo
	@echo "The curves are drawn in target/compare.svg."

test: lint test-prereqs ## all checks and tests that a change must pass
	@$(XTASK) test --records "$(TARGET)/tests"

# If the test bed cannot be built, its tests are skipped and counted; in CI that is an error.
.PHONY: test-prereqs
test-prereqs: toolchain
	@if [ "$${CI:-false}" != false ]; then $(MAKE) --no-print-directory binaries; \
	  else $(MAKE) --no-print-directory binaries || echo "tests that need the test bed will be skipped"; fi

test-unit: toolchain ## run unit tests only: no root, no Kubernetes; tests that need more are skipped
	env -u CI cargo test --workspace --lib --bins

lint: toolchain cargo-deny typos ## check formatting, clippy, docs, dependencies, spelling and names
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy --workspace --all-targets -- --deny warnings
	cargo clippy --package partage --no-default-features -- --deny warnings
	cargo check --quiet --manifest-path fuzz/Cargo.toml --target-dir "$(TARGET)"
	RUSTDOCFLAGS="--deny warnings" cargo doc --workspace --no-deps --quiet
	"$(TOOLS)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny" --log-level error check bans licenses sources
	"$(TOOLS)/typos-$(TYPOS_VERSION)/bin/typos"
	@$(XTASK) text-check

audit: toolchain cargo-deny ## check dependencies for known vulnerabilities (needs the network)
	"$(TOOLS)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny" --log-level error check advisories

bench: binaries ## run the benchmarks of docs/benchmarks.md
	cargo bench --package partage-core
	cargo bench --package partage-sim-driver
	cargo bench --package partage-region
	cargo bench --package partage-shim
	cargo bench --package partage --bench workstation
	$(MAKE) --no-print-directory bench-node
	cargo bench --profile dev --package partage-testkit --bench bed  # it measures Kubernetes, not this code

bench-compute: toolchain ## measure shares of compute with programs of many kinds: SECONDS, BUSY, PAIRS=quick, STRICT, PARTS="rows zoo handover"
	cargo bench --package partage-shim --bench compute -- $(PARTS) $(SECONDS:%=--seconds %) $(BUSY:%=--busy %) $(PAIRS:%=--pairs %) $(STRICT:%=--strict)

bench-node: binaries ## benchmark the node agent on a real kubelet; STRICT=1 fails if a target is missed
	cargo build --release --package partage --package partage-samples --package partage-sim-driver --package partage-shim
	cargo bench --package partage-e2e --bench node -- $(STRICT:%=--strict)

fuzz: toolchain cargo-fuzz ## fuzz every parser of tenant input, FUZZ_SECONDS (60) each
	@rustup toolchain list | grep -q nightly || { echo "error: fuzzing needs a nightly compiler: rustup toolchain install nightly" >&2; exit 1; }
	@for target in $(FUZZ_TARGETS); do \
	  echo "== $$target, $(FUZZ_SECONDS) s"; \
	  case "$$target" in $(FUZZ_LONG_INPUT_TARGETS)) length=-len_control=0;; *) length=;; esac; \
	  PATH="$(TOOLS)/cargo-fuzz-$(FUZZ_VERSION)/bin:$$PATH" cargo +nightly fuzz run "$$target" -- \
	    -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
	    $$length || exit 1; \
	done

readme-image: toolchain ## redraw the README's image, docs/images/up.svg, from a real run
	cargo build --release --package partage --package partage-samples --package partage-sim-driver --package partage-shim
	cargo test --release --package partage-e2e --test workstation readme_image -- --ignored

soak: binaries ## long tests: many property cases, 5,000 fake nodes, hundreds of kills, minutes of fuzzing
	PROPTEST_CASES=50000 cargo test --release --package partage-core
	PROPTEST_CASES=20000 cargo test --release --package partage-region --lib properties
	cargo test --package partage-testkit --test bed scheduling -- --ignored
	cargo test --package partage-shim --test killed_processes -- --ignored
	cargo build --package partage --package partage-samples
	cargo test --package partage-e2e --test node agent_crashes -- --ignored
	$(MAKE) fuzz FUZZ_SECONDS=300

binaries: toolchain ## download and build the programs, images and clients of the test bed (docs/testbed.md)
	@$(XTASK) binaries
	@$(XTASK) images $(FRESH:%=--fresh)
	@$(XTASK) clients
	@$(XTASK) shim

shim: toolchain ## build the shim for old images (glibc 2.17): target/portable/libpartage_shim.so
	@$(XTASK) shim

cluster: binaries image ## start a real Kubernetes cluster with Partage and simulated GPUs (NODES=2 for two nodes)
	@cargo run --quiet --package partage-testkit -- cluster up --nodes $(or $(NODES),1) --partage dist/partage.oci.tar

cluster-down: toolchain ## stop and remove that cluster
	@cargo run --quiet --package partage-testkit -- cluster down

# The released program: optimized across crates and stripped; the debug information is a separate file.
.PHONY: dist
dist: toolchain
	cargo build --profile dist --package partage
	@mkdir -p "$(DIST)/stripped"
	@objcopy --only-keep-debug "$(DIST)/partage" "$(DIST)/stripped/partage.debug"
	@cd "$(DIST)/stripped" && objcopy --strip-all --add-gnu-debuglink=partage.debug ../partage partage
	@strip --strip-unneeded --output-file="$(DIST)/stripped/libpartage_sim.so" "$(DIST)/deps/libpartage_sim.so"

image: shim dist ## build Partage's image, dist/partage.oci.tar, without Docker
	@$(XTASK) image --program "$(DIST)/stripped/partage" --shim "$(SHIM)" \
	  --archive dist/partage.oci.tar $(FRESH:%=--fresh)

release: binaries image cargo-cyclonedx ## build the archive, chart, image, SBOM and checksums in dist/release
	@PATH="$(TOOLS)/cargo-cyclonedx-$(CYCLONEDX_VERSION)/bin:$$PATH" tools/release "$(DIST)/stripped" "$(SHIM)" "$(TARGET)/debug/partage-xtask"

manifests: toolchain ## generate the plain manifests in deploy/ from the chart
	@$(XTASK) binaries
	@$(XTASK) manifests

toolchain:
	@tools/toolchain

# cargo installs a program completely or not at all, so an interrupted build is repeated. Its path may contain spaces, so it
# cannot be a target.
.PHONY: cargo-deny cargo-fuzz cargo-cyclonedx typos
cargo-deny: VERSION := $(DENY_VERSION)
cargo-fuzz: VERSION := $(FUZZ_VERSION)
cargo-cyclonedx: VERSION := $(CYCLONEDX_VERSION)
cargo-deny cargo-fuzz cargo-cyclonedx: toolchain
	@[ -x "$(TOOLS)/$@-$(VERSION)/bin/$@" ] || { \
	  echo "building $@ $(VERSION) into $(TOOLS), once (some minutes)"; \
	  cargo install --locked --quiet --version "$(VERSION)" --root "$(TOOLS)/$@-$(VERSION)" "$@"; }

# The spelling checker is installed from a wheel that contains the program: nothing is built.
typos:
	@[ -x "$(TOOLS)/typos-$(TYPOS_VERSION)/bin/typos" ] || { \
	  echo "installing typos $(TYPOS_VERSION) into $(TOOLS)"; \
	  tools/pip-install "$(TOOLS)/typos-$(TYPOS_VERSION)" "typos==$(TYPOS_VERSION)"; }
