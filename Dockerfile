# megatrain with the torch that CUDA needs, which its own wheels bring.
#
#   docker build -t megatrain .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u):$(id -g)" -v "$PWD:/workspace" \
#       megatrain train my.yaml
#
# This file is checked by hadolint. It has never been built.
FROM python:3.12-slim

# A compiler for C: torch.compile and Triton build small programs with it. The newest of the distribution is right.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY megatrain megatrain
RUN pip install --no-cache-dir --constraint constraints.txt '.[gpu,report,trl]'

# Whoever starts it may be any user, with one directory to write to.
WORKDIR /workspace
ENV HOME=/workspace
ENTRYPOINT ["megatrain"]
CMD ["--help"]
