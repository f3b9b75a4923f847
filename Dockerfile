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
RUN useradd --system --uid 10001 --user-group --no-create-home delayserver \
    && install --directory --owner delayserver --group delayserver --mode 0750 /data

WORKDIR /data
USER delayserver
VOLUME /data
EXPOSE 8080
ENV DELAYSERVER_HOST=0.0.0.0 DELAYSERVER_PORT=8080 DELAYSERVER_DATA_DIR=/data

# /readyz answers 200 once recovery is done. A long recovery is not a failure: no restart loop. Its own
# certificate is not what is looked at; with DELAYSERVER_TLS_CLIENT_CA put a check of yours here.
HEALTHCHECK --interval=10s --timeout=3s --start-period=2m --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; tls = os.environ.get('DELAYSERVER_TLS_CERT'); r.urlopen(('https' if tls else 'http') + '://127.0.0.1:' + os.environ['DELAYSERVER_PORT'] + '/readyz', timeout=2, context=ssl._create_unverified_context() if tls else None)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["delayserver", "serve"]
