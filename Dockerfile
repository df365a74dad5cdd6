# Builds Partage's image with Docker:
#   docker build --build-arg PARTAGE_COMMIT=$(git rev-parse --short=12 HEAD) --tag localhost/partage .
# `make image` builds it without Docker: the same program, shim and entrypoint on a smaller base.

FROM rust:1.95-bookworm AS build
WORKDIR /partage
COPY . .
# The commit that `partage --version` prints: the build context has no git directory.
ARG PARTAGE_COMMIT
RUN PARTAGE_COMMIT="$PARTAGE_COMMIT" cargo build --profile dist --locked --package partage \
    && strip --strip-all target/dist/partage && strip --strip-unneeded target/dist/deps/libpartage_sim.so
# The shim must load with the glibc of every image: zig links it against glibc 2.17 (2012).
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && python3 -m venv /zig \
    && /zig/bin/pip install --require-hashes --requirement xtask/portable-requirements.txt
RUN PATH="/zig/bin:$PATH" cargo zigbuild --release --locked --package partage-shim --lib --target "$(uname -m)-unknown-linux-gnu.2.17" \
    && cp "target/$(uname -m)-unknown-linux-gnu/release/libpartage_shim.so" target/dist/portable_shim.so

# The same Debian release as the build stage: the program does not start with an older glibc.
FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="partage" org.opencontainers.image.licenses="Apache-2.0"
COPY LICENSE /usr/share/doc/partage/LICENSE
COPY --from=build /partage/target/dist/partage /usr/bin/partage
COPY --from=build /partage/target/dist/portable_shim.so /usr/lib/partage/libpartage_shim.so
COPY --from=build /partage/target/dist/deps/libpartage_sim.so /usr/lib/partage/libpartage_sim.so
# No USER: commands need no rights, and the agent needs root. Set runAsUser if you run only commands.
ENTRYPOINT ["/usr/bin/partage"]
