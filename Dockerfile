# An image for runs on NVIDIA GPUs. Untested (2026-11-26): no machine with a GPU has run it yet.
#
#     docker build -t step-engine .
#     docker run --rm -it --gpus all --shm-size 64g -v "$PWD":/work step-engine engine check configs/gpu_1.yaml
#
# The host needs an NVIDIA driver for CUDA 13 and the NVIDIA container toolkit. --shm-size must hold three versions of the weights.
# Models and data are downloaded when a run starts, into /work/.cache.

FROM python:3.11-slim

# vLLM and torch compile kernels when they start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/step-engine
COPY constraints-gpu.txt pyproject.toml setup.py README.md LICENSE ./
COPY engine engine
COPY configs configs
COPY dashboards dashboards
RUN pip install --no-cache-dir -c constraints-gpu.txt '.[all,vllm]'

ENV HF_HOME=/work/.cache/huggingface
WORKDIR /work
CMD ["engine", "--help"]
