# Stands in for the stock image haproxy:3.2-alpine where no registry of images is reached: Debian's HAProxy, the oldest that
# deploy/haproxy.cfg is written for, and the wget of Alpine's busybox.
FROM debian:bookworm-slim
LABEL rollout-service.stand-in=true
RUN apt-get update \
    && apt-get install -y --no-install-recommends busybox-static haproxy \
    && apt-get clean && rm -rf /var/lib/apt/lists/* \
    && ln -s busybox /bin/wget
USER haproxy
STOPSIGNAL SIGUSR1
ENTRYPOINT ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]
