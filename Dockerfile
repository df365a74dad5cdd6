# Partage's image for those who have Docker:  docker build --tag localhost/partage .
# `make image` makes it without Docker: the same program and entrypoint above fewer files.

FROM rust:1.95-bookworm AS build
WORKDIR /partage
COPY . .
RUN cargo build --release --locked --package partage

# The release of the first stage: an older glibc would not start the program.
FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="partage" org.opencontainers.image.licenses="Apache-2.0"
COPY LICENSE /usr/share/doc/partage/LICENSE
COPY --from=build /partage/target/release/partage /usr/bin/partage
COPY --from=build /partage/target/release/deps/libpartage_sim.so /usr/lib/partage/libpartage_sim.so
# No USER: commands need none, and what acts on a node needs root. Set runAsUser where a command is all you run.
ENTRYPOINT ["/usr/bin/partage"]
