# Three images from one file: `text` for gateway, tokenizer and detokenizer (no torch), `engine` for the model, and
# `engine-cuda`, which adds what Triton needs for its first launch.
#
#   docker build --target text        -t sluice-text .
#   docker build --target engine      -t sluice-engine .
#   docker build --target engine-cuda -t sluice-engine-cuda .
#
# torch comes for CUDA, gigabytes of it, unless pip is told where there are wheels for CPU alone: by --build-arg
# PIP_EXTRA_INDEX_URL=…, PyTorch's index for CPU as pytorch.org's page about installing gives it, or by the base image's
# own configuration (/etc/pip.conf).
#
# Without a network: put wheels of everything in deploy/wheels, give a BASE_IMAGE that has Python 3.11 to 3.14, pip, and
# --build-arg PIP_NO_INDEX=1; COMPILER= (empty) goes without our own CPU kernels. Every version is pinned by
# constraints.txt; what pip installed stays listed in the images (*.dist-info), for SBOM tools.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG COMPILER=g++
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_FIND_LINKS=/src/deploy/wheels
RUN if [ -n "$COMPILER" ] && ! command -v c++ >/dev/null; then \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends "$COMPILER" python3-dev libc6-dev; fi
WORKDIR /src
ARG PIP_NO_INDEX=""
ARG PIP_EXTRA_INDEX_URL=""
COPY deploy/requirements-text.txt deploy/requirements-engine.txt deploy/wheel[s] deploy/wheels/
COPY constraints.txt ./
RUN python3 -m venv /opt/build && /opt/build/bin/pip install -q -c constraints.txt "setuptools>=77" wheel \
 && python3 -m venv /opt/text --without-pip && python3 -m venv /opt/engine --without-pip
RUN /opt/build/bin/pip --python /opt/text/bin/python install -q -c constraints.txt -r deploy/wheels/requirements-text.txt
RUN /opt/build/bin/pip --python /opt/engine/bin/python install -q -c constraints.txt \
      -r deploy/wheels/requirements-engine.txt
COPY pyproject.toml setup.py README.md MANIFEST.in LICENSE ./
COPY sluice_server sluice_server
COPY kernels kernels
RUN /opt/build/bin/python setup.py -q build_ext
COPY clients/python clients/python
COPY engine engine
COPY services services
COPY demo demo
RUN mkdir /dist && /opt/build/bin/pip wheel -q --no-deps --no-build-isolation -w /dist ./clients/python . \
 && for one in text engine; do \
      /opt/build/bin/pip --python /opt/$one/bin/python install -q --no-deps --no-index /dist/*.whl; done \
 && rm -rf /opt/text/lib/python3*/site-packages/sluice_server/kernels/cpu \
      /opt/text/lib/python3*/site-packages/sluice_server/demo/draft \
      /opt/text/lib/python3*/site-packages/sluice_server/demo/head \
      /opt/text/lib/python3*/site-packages/sluice_server/demo/target/*.safetensors
# The text roles fetch no weights in bulk (hf_xet is for that, and optional) and need no symbols of others' C code.
RUN /opt/build/bin/pip --python /opt/text/bin/python uninstall -q -y hf_xet \
 && if command -v strip >/dev/null; then find /opt/text -name '*.so' -exec strip --strip-debug {} +; fi \
 && rm -rf /opt/text/lib/python3*/site-packages/*/tests

FROM ${BASE_IMAGE} AS base
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin sluice \
 && for role in all gateway tokenizer engine detokenizer worker-1 worker-2; do install -d -o sluice -g sluice -m 0700 "/keys/$role"; done \
 && install -d -o sluice -g sluice -m 0700 /run/sluice
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false \
    SLUICE_HEARTBEAT_DIR=/run/sluice SLUICE_LOG_FORMAT=json
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["sluice"]
CMD ["serve"]

FROM base AS text
COPY --from=build /opt/text /opt/text
ENV PATH=/opt/text/bin:$PATH
LABEL org.opencontainers.image.title="sluice text" org.opencontainers.image.licenses="Apache-2.0"

FROM base AS engine
COPY --from=build /opt/engine /opt/engine
ENV PATH=/opt/engine/bin:$PATH OMP_WAIT_POLICY=passive
LABEL org.opencontainers.image.title="sluice engine" org.opencontainers.image.licenses="Apache-2.0"

# Triton compiles a module of C at its first launch, and loads it from its cache: a volume keeps it and all kernels.
FROM engine AS engine-cuda
USER 0:0
RUN if ! command -v cc >/dev/null || ! test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; then \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev \
      && rm -rf /var/lib/apt/lists/*; fi \
 && install -d -o sluice -g sluice -m 0700 /cache
ENV TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
USER 10001:10001
LABEL org.opencontainers.image.title="sluice engine for CUDA"
