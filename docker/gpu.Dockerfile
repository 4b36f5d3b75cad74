# syntax=docker/dockerfile:1.7
# pods_cluster on NVIDIA GPUs. The wheels bring CUDA's libraries: the host needs a driver (CUDA 13: 580 or newer) and
# NVIDIA's container toolkit, nothing else. From the repository's root:
#   docker build -f docker/gpu.Dockerfile -t pods-cluster:gpu .
ARG PYTHON=3.12.11-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0 PIP_CONSTRAINT=/src/docker/gpu-constraints.txt
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/ requirements/
COPY docker/gpu-constraints.txt docker/gpu-constraints.txt
RUN pip install setuptools==78.1.1 wheel==0.45.1 \
    && pip install --requirement requirements/gpu.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY pods_cluster/ pods_cluster/
# the page serves it: in the package it is a link to this file
COPY docs/troubleshooting.md docs/troubleshooting.md
# hadolint ignore=DL3013
RUN pip install --no-build-isolation ".[dashboard,tensorboard]"

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="pods_cluster (GPU)" org.opencontainers.image.licenses="Apache-2.0"
# wget: KubeRay's health probes. gcc: Triton compiles a launcher for each kernel. tini: reaps the processes that Ray leaves.
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libgomp1 libnuma1 tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash ray \
    && install --directory --owner ray --group ray /runs \
    # KubeRay starts a login shell, which sets PATH anew
    && echo 'export PATH=/opt/venv/bin:$PATH' > /etc/profile.d/pods.sh
COPY --from=build /opt/venv /opt/venv
COPY configs/ /opt/pods/configs/
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/ray
ENTRYPOINT ["tini", "--"]
CMD ["pods", "--help"]
