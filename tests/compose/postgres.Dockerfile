# Stands in for the stock image postgres:15 where no registry of images is reached: Debian's PostgreSQL 15 with as much of
# that image's manner as docker-compose.yml relies on. Its user has the uid it has there.
FROM debian:bookworm-slim
LABEL rollout-service.stand-in=true
RUN groupadd --system --gid 999 postgres \
    && useradd --system --uid 999 --gid postgres --home-dir /var/lib/postgresql --shell /bin/bash postgres \
    && apt-get update \
    && apt-get install -y --no-install-recommends postgresql-15 \
    && apt-get clean && rm -rf /var/lib/apt/lists/* \
    && rm -rf /var/lib/postgresql/15 \
    && install -d -o postgres -g postgres -m 1777 /var/lib/postgresql/data \
    && install -d -o postgres -g postgres -m 3777 /var/run/postgresql
ENV PATH=/usr/lib/postgresql/15/bin:$PATH PGDATA=/var/lib/postgresql/data LANG=C.UTF-8
COPY postgres-entry.sh /usr/local/bin/docker-entrypoint.sh
VOLUME /var/lib/postgresql/data
EXPOSE 5432
STOPSIGNAL SIGINT
ENTRYPOINT ["sh", "/usr/local/bin/docker-entrypoint.sh"]
CMD ["postgres"]
