# The gateway: the OpenAI API over HTTP. Built from the repository's root:
#   docker build --network host -f deploy/docker/gateway.Dockerfile -t catenary-gateway .
# Behind a proxy with its own authority: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# Another package index; pip's default if empty.
ARG PACKAGE_INDEX=
COPY requirements/gateway.lock /build/
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python -m venv --without-pip /opt/venv \
    && python -m pip --python /opt/venv/bin/python --disable-pip-version-check install -q \
        ${PACKAGE_INDEX:+--index-url "$PACKAGE_INDEX"} --require-hashes -r /build/gateway.lock
WORKDIR /app
COPY catenary ./catenary
COPY gateway ./gateway
RUN python -m compileall -q /app

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin catenary \
    && install -d -m 0700 -o 10001 -g 10001 /state
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python", "-m", "gateway"]
