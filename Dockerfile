# Partage's image for those who have Docker:  docker build --tag localhost/partage .
# `make image` makes it without Docker: the same program, shim and entrypoint above fewer files.

FROM rust:1.95-bookworm AS build
WORKDIR /partage
COPY . .
RUN cargo build --release --locked --package partage
# What containers load runs with the C library of every image: zig links it against that of 2012.
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && python3 -m venv /zig \
    && /zig/bin/pip install --require-hashes --requirement xtask/portable-requirements.txt
RUN PATH="/zig/bin:$PATH" cargo zigbuild --release --locked --package partage-shim --lib --target "$(uname -m)-unknown-linux-gnu.2.17" \
    && cp "target/$(uname -m)-unknown-linux-gnu/release/libpartage_shim.so" target/release/portable_shim.so

# The release of the first stage: an older glibc would not start the program.
FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="partage" org.opencontainers.image.licenses="Apache-2.0"
COPY LICENSE /usr/share/doc/partage/LICENSE
COPY --from=build /partage/target/release/partage /usr/bin/partage
COPY --from=build /partage/target/release/portable_shim.so /usr/lib/partage/libpartage_shim.so
COPY --from=build /partage/target/release/deps/libpartage_sim.so /usr/lib/partage/libpartage_sim.so
# No USER: commands need none, and what acts on a node needs root. Set runAsUser where a command is all you run.
ENTRYPOINT ["/usr/bin/partage"]
