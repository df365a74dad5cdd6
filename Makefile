# The words of this project. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Tools are built once and shared by all checkouts.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/partage
TOOLS := $(CACHE)/tools
DENY_VERSION := 0.20.2
FUZZ_VERSION := 0.13.2
FUZZ_TARGETS = $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
FUZZ_SECONDS ?= 60
# Its inputs are sequences of calls, five bytes each: a fuzzer that begins with short inputs stays at two for minutes.
FUZZ_LONG = driver_calls

# Set, images are made with the newest packages and not with those that were fetched before.
FRESH ?=

TRACE := traces/openb
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
PARTAGE := $(RELEASE)/partage
SHIM := $(TARGET)/portable/libpartage_shim.so

# Built as a part of the workspace: its dependencies then have the features that the tests build them with, and are built once.
XTASK := cargo build --quiet --workspace --bin partage-xtask && "$(TARGET)/debug/partage-xtask"

.PHONY: help run simulate picture test lint bench bench-node fuzz soak binaries shim cluster cluster-down image manifests toolchain

help: ## list these words
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/' | expand -t 20

run: toolchain ## share two GPUs between three programs for a minute; without a GPU, simulated ones
	cargo build --release --package partage --package partage-samples --package partage-sim-driver --package partage-shim
	@PATH="$$(cd "$(RELEASE)" && pwd):$$PATH" partage up --start examples/workloads.yaml --for 60s

simulate: toolchain ## replay a production trace under every policy and compare
	cargo build --release --package partage
	"$(PARTAGE)" simulate --nodes $(TRACE)/openb_node_list_gpu_node.csv --pods $(TRACE)/openb_pod_list_default.csv \
	  --compare --plot target/compare.svg
	@echo
	@echo "The curves are drawn in target/compare.svg."

test: lint test-prereqs ## everything that must hold before a change lands
	@$(XTASK) test --records "$(TARGET)/tests"

# Where the test bed cannot be built, its tests are skipped and counted; in CI that is a failure.
.PHONY: test-prereqs
test-prereqs: toolchain
	@if [ "$${CI:-false}" != false ]; then $(MAKE) --no-print-directory binaries; \
	  else $(MAKE) --no-print-directory binaries || echo "tests that need the test bed will be skipped"; fi

lint: toolchain cargo-deny ## formatting, clippy, docs, dependencies
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy --workspace --all-targets -- --deny warnings
	cargo clippy --package partage --no-default-features -- --deny warnings
	cargo check --quiet --manifest-path fuzz/Cargo.toml --target-dir "$(TARGET)"
	RUSTDOCFLAGS="--deny warnings" cargo doc --workspace --no-deps --quiet
	"$(TOOLS)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny" --log-level error check bans licenses sources

bench: binaries ## the figures of docs/benchmarks.md
	cargo bench --package partage-core
	cargo bench --package partage-sim-driver
	cargo bench --package partage-region
	cargo bench --package partage-shim
	cargo bench --package partage --bench local
	$(MAKE) --no-print-directory bench-node
	cargo bench --profile dev --package partage-testkit --bench bed  # what is measured is not ours to optimise

bench-node: binaries ## what the node agent costs and keeps, on a real kubelet; STRICT=1 fails where a figure is missed
	cargo build --release --package partage --package partage-samples --package partage-sim-driver --package partage-shim
	cargo bench --package partage-e2e --bench node -- $(STRICT:%=--strict)

fuzz: toolchain cargo-fuzz ## every parser of tenant input, FUZZ_SECONDS (60) each
	@rustup toolchain list | grep -q nightly || { echo "error: fuzzing needs a nightly compiler: rustup toolchain install nightly" >&2; exit 1; }
	@for target in $(FUZZ_TARGETS); do \
	  echo "== $$target, $(FUZZ_SECONDS) s"; \
	  case "$$target" in $(FUZZ_LONG)) length=-len_control=0;; *) length=;; esac; \
	  PATH="$(TOOLS)/cargo-fuzz-$(FUZZ_VERSION)/bin:$$PATH" cargo +nightly fuzz run "$$target" -- \
	    -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
	    $$length || exit 1; \
	done

picture: toolchain ## the README's picture, docs/images/up.svg, from a real run
	cargo build --release --package partage --package partage-samples --package partage-sim-driver --package partage-shim
	cargo test --release --package partage-e2e --test workstation picture -- --ignored

soak: binaries ## the long runs: many property cases, 5,000 fake nodes, hundreds of kills, fuzzing for minutes
	PROPTEST_CASES=50000 cargo test --release --package partage-core
	PROPTEST_CASES=20000 cargo test --release --package partage-region --lib properties
	cargo test --package partage-testkit --test bed scheduling -- --ignored
	cargo test --package partage-shim --test kills -- --ignored
	cargo build --package partage --package partage-samples
	cargo test --package partage-e2e --test node kills -- --ignored
	$(MAKE) fuzz FUZZ_SECONDS=300

binaries: toolchain ## the programs, images and clients of the test bed (docs/testbed.md), made once
	@$(XTASK) binaries
	@$(XTASK) images $(FRESH:%=--fresh)
	@$(XTASK) clients
	@$(XTASK) shim

shim: toolchain ## the shim for every image (glibc 2.17), target/portable/libpartage_shim.so
	@$(XTASK) shim

cluster: binaries image ## a real Kubernetes with Partage and simulated GPUs to try things on (NODES=2 for more nodes)
	@cargo run --quiet --package partage-testkit -- cluster up --nodes $(or $(NODES),1) --partage dist/partage.oci.tar

cluster-down: toolchain ## ends it; nothing of it stays
	@cargo run --quiet --package partage-testkit -- cluster down

image: shim ## Partage's own image, dist/partage.oci.tar, without Docker
	cargo build --release --package partage
	@$(XTASK) image --program "$(PARTAGE)" --shim "$(SHIM)" \
	  --archive dist/partage.oci.tar $(FRESH:%=--fresh)

manifests: toolchain ## the plain manifests in deploy/, from the chart
	@$(XTASK) binaries
	@$(XTASK) manifests

toolchain:
	@tools/toolchain

# cargo installs a program whole or not at all: an interrupted build is repeated. A path may have spaces, so it is no target.
.PHONY: cargo-deny cargo-fuzz
cargo-deny: VERSION := $(DENY_VERSION)
cargo-fuzz: VERSION := $(FUZZ_VERSION)
cargo-deny cargo-fuzz: toolchain
	@[ -x "$(TOOLS)/$@-$(VERSION)/bin/$@" ] || { \
	  echo "building $@ $(VERSION) into $(TOOLS), once (some minutes)"; \
	  cargo install --locked --quiet --version "$(VERSION)" --root "$(TOOLS)/$@-$(VERSION)" "$@"; }
