# The tokenizer: chat templates and tokenization. Built from the repository's root:
#   docker build --network host -f deploy/docker/tokenizer.Dockerfile -t catenary-tokenizer .
# Behind a proxy with its own authority: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# Another package index; pip's default if empty.
ARG PACKAGE_INDEX=
COPY requirements/tokenizer.lock /build/
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python -m venv --without-pip /opt/venv \
    && python -m pip --python /opt/venv/bin/python --disable-pip-version-check install -q \
        ${PACKAGE_INDEX:+--index-url "$PACKAGE_INDEX"} --require-hashes -r /build/tokenizer.lock
WORKDIR /app
COPY catenary ./catenary
COPY services/__init__.py ./services/
COPY services/tokenizer ./services/tokenizer
RUN python -m compileall -q /app

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin catenary
# The mount point of the model volume; a new volume takes its owner from here.
RUN install -d -o 10001 -g 10001 /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
USER 10001:10001
EXPOSE 7071
ENTRYPOINT ["python", "-m", "services.tokenizer"]
