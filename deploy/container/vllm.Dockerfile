# syntax=docker/dockerfile:1
# Baton's connector for vLLM's own images. Build from the root of the repository:
#
#   docker build -f deploy/container/vllm.Dockerfile --target connector -t registry.example/baton/vllm-connector:0.1.0 .
#   docker build -f deploy/container/vllm.Dockerfile --target wheel --output dist .
#
# `connector` is for an init container (deploy/kubernetes/overlays/vllm-baton), or the source of a derived image.
# `wheel` contains the wheel alone. No container engine has built these targets yet.

FROM rust:1.95-bookworm AS toolchain

# The wheel needs glibc 2.28, which is older than that of vLLM's images. For ARM: manylinux_2_28_aarch64.
FROM quay.io/pypa/manylinux_2_28_x86_64:latest AS build
COPY --from=toolchain /usr/local/rustup/ /usr/local/rustup/
COPY --from=toolchain /usr/local/cargo/ /usr/local/cargo/
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:/opt/python/cp312-cp312/bin:$PATH
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    python -m pip wheel --no-deps --wheel-dir /built ./connector/vllm && auditwheel repair --wheel-dir /wheel /built/*.whl
# The package, and beside it its dist-info with the entry point. One wheel serves every Python 3 from 3.10.
RUN python -m pip install --no-deps --no-compile --target /baton-vllm /wheel/*.whl

FROM scratch AS wheel
COPY --from=build /wheel/ /

# `cp` is all that an init container needs.
FROM busybox:1.37 AS connector
COPY --from=build /baton-vllm/ /baton-vllm/
USER 65532:65532
