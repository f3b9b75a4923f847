# The delay server. Data is in /data; other settings are DELAYSERVER_... variables, or options
# after the image's name (docker run delayserver --help).
#
# The server is reached from outside the container, so it listens on every address, and refuses
# to start there without DELAYSERVER_TOKEN.
FROM python:3.11-slim

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

WORKDIR /usr/src/delayserver
COPY pyproject.toml README.md LICENSE ./
COPY scripts/constraints.txt scripts/
COPY delayserver delayserver
COPY storage storage
RUN pip install --no-cache-dir --disable-pip-version-check --root-user-action ignore \
        --compile --constraint scripts/constraints.txt '.[server]' \
    && useradd --system --uid 10001 --user-group --no-create-home delayserver \
    && install --directory --owner delayserver --group delayserver --mode 0750 /data

WORKDIR /data
USER delayserver
VOLUME /data
EXPOSE 8080
ENV DELAYSERVER_HOST=0.0.0.0 DELAYSERVER_PORT=8080 DELAYSERVER_DATA_DIR=/data

# /readyz answers 200 once recovery is done. A long recovery is not a failure: no restart loop.
HEALTHCHECK --interval=10s --timeout=3s --start-period=2m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['DELAYSERVER_PORT'] + '/readyz', timeout=2)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["delayserver", "serve"]
