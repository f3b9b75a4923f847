# The delay server. Data is in /data; other settings are DELAYSERVER_... variables, or options
# after the image's name (docker run delayserver --help).
#
# The server is reached from outside the container, so it listens on every address, and refuses
# to start there without DELAYSERVER_TOKEN.
FROM python:3.11-slim AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/delayserver
WORKDIR /usr/src/delayserver

# What it depends on, first: a change of its own files installs only itself.
COPY pyproject.toml README.md LICENSE ./
COPY scripts/constraints.txt scripts/
RUN mkdir delayserver storage && touch delayserver/__init__.py storage/__init__.py \
    && /opt/delayserver/bin/pip install --constraint scripts/constraints.txt ".[server,kafka,redis,nats,amqp,otel]" \
    && /opt/delayserver/bin/pip uninstall --yes delayserver

COPY delayserver delayserver
COPY storage storage
RUN /opt/delayserver/bin/pip install --compile --no-deps .

FROM python:3.11-slim

LABEL org.opencontainers.image.title="delayserver" \
      org.opencontainers.image.description="A delayed-message server" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/delayserver/bin:$PATH
COPY --from=build /opt/delayserver /opt/delayserver
RUN groupadd --system --gid 10001 delayserver \
    && useradd --system --uid 10001 --gid 10001 --no-create-home delayserver \
    && install --directory --owner delayserver --group delayserver --mode 0750 /data

WORKDIR /data
# By its number: Kubernetes cannot tell from a name that it is not root.
USER 10001:10001
VOLUME /data
EXPOSE 8080
ENV DELAYSERVER_HOST=0.0.0.0 DELAYSERVER_PORT=8080 DELAYSERVER_DATA_DIR=/data

# It asks the server that these variables start, by HTTPS where they name a certificate. What is said
# in arguments instead, such as --port, it does not know: use variables. A long recovery is no failure.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["delayserver", "ready", "--here"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["delayserver", "serve"]
