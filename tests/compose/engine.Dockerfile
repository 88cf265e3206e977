# What the engine's bind-mounted environment needs of a system: the libraries its Python and its torch are linked to, and
# a python3 for the health check of docker-compose.yml. The environment itself is mounted where it stands on the host.
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 libnuma1 python3 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
