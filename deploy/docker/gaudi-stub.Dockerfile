# Stands in for the vendor's Gaudi image in `make compose-test`: a torch that must not change, and the metadata of the
# vendor's plugin. It shows that the engine's target hpu builds, installs beside them and starts; nothing more.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
ARG PACKAGE_INDEX=
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=deploy/docker/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip --disable-pip-version-check install -q --no-deps --find-links /wheels \
        ${PACKAGE_INDEX:+--index-url "$PACKAGE_INDEX"} ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
RUN site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/habana_torch_plugin-1.24.0.dist-info \
    && mkdir -p "$site" \
    && printf 'Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.24.0\nRequires-Dist: %s\n' "$TORCH" >"$site/METADATA"
