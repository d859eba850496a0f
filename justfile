# The menu. Every recipe is one plain command that works without `just`.

# what there is
default:
    @just --list

# router, prefill and decode engine on loopback
up *ARGS:
    cargo run --release -- up {{ARGS}}

# all that CI does
ci:
    .ci/run

test:
    cargo test --workspace

# every state of a small system of the machines; minutes, some gigabytes
model:
    cargo test --release --test model -- --nocapture

# a thousand rounds of faults against real processes; a quarter of an hour
faults:
    cargo test --test faults -- --rounds 1000

lint:
    cargo clippy --workspace --all-targets -- -D warnings

format:
    cargo fmt --all

# golden tables of the machines, after a change that was meant
bless:
    BATON_BLESS=1 cargo test -p baton-connector

# the numbers of README.md
bench-engine:
    cargo run --release -- bench engine
bench-transfer:
    cargo run --release -- bench transfer
bench-router:
    cargo run --release -- bench router

# OpenAI's, Anthropic's and six more clients against `baton up`; --install fetches their packages, skips loudly without
clients *OPTIONS:
    tests/clients/run.sh {{OPTIONS}}

# NIXL's real library from PyPI: transfers, aborts, stale reads, kill -9, SIGSTOP, oversize; skips loudly without PyPI
nixl *ROUNDS:
    tests/peers/nixl.sh {{ROUNDS}}

# alerts and board with a real Prometheus; skips loudly without
prometheus:
    tests/peers/prometheus.sh

# the board against Grafana's own types, from npm; skips loudly without
grafana:
    tests/peers/grafana/run.sh

# /top and the committed report in headless Chromium; skips loudly without
browser *OPTIONS:
    tests/peers/browser.sh {{OPTIONS}}

# every CUDA kernel for every architecture, without a GPU; skips loudly without PyPI
gpu-compile:
    bench/gpu/compile.sh target/release/baton

# everything that needs a GPU; exits with 77 without one
gpu-check:
    bench/gpu/check.sh target/release/baton

# golden outputs of transformers, in a folder made by make_tiny.py
parity DIR:
    cargo run --release -- parity {{DIR}}

# advisories, licences, bans (needs cargo-deny)
deny:
    cargo deny check
