# docker build -t perdure .
# docker run --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u):$(id -g)" \
#   -v "$PWD/data:/perdure/data" -v "$PWD/runs:/perdure/runs" perdure train recipes/qwen3_0_6b.yaml
# docker run --entrypoint torchrun … perdure --standalone --nproc-per-node gpu -m trainer RECIPE
# --user: what is written into mounted folders belongs to you. Make them before docker does, as root.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# g++ and Python's headers are for torch.compile. NCCL loads libibverbs with its providers at run
# time, for InfiniBand and RoCE; AWS's EFA needs a plugin of Amazon's on top. tini, as process 1,
# hands on signals and buries what outlives its parent.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ tini \
    libibverbs1 ibverbs-providers librdmacm1t64 \
 && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/perdure/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/perdure

# What changes least comes first: torch, then all other dependencies, then the code.
ARG TORCH=torch==2.13.0
RUN pip install $TORCH

WORKDIR /opt/perdure/src
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; file = tomllib.load(open("pyproject.toml", "rb")); \
    project = file["project"]; extras = project["optional-dependencies"]; \
    names = "parquet", "zstd", "tensorboard", "s3", "gs", "az"; \
    wanted = [extras[name] for name in names]; \
    print(*file["build-system"]["requires"], *project["dependencies"], *sum(wanted, []), sep="\n")' \
    > /opt/perdure/requirements.txt \
 && pip install -r /opt/perdure/requirements.txt

COPY README.md LICENSE setup.py perdure.py ./
COPY trainer trainer
COPY elastic elastic
COPY checkpointing checkpointing
COPY lab lab
COPY recipes recipes
RUN pip install --no-deps --no-build-isolation .

# The code is not here: `-m trainer` would run it instead of what is installed.
WORKDIR /perdure
COPY recipes recipes
# Any user may run it, also one without a name: torch asks for name and home to place its caches.
ENV USER=perdure HOME=/perdure/home
RUN mkdir -m 1777 home data runs && chmod 1777 .
USER 1000:1000
# Unhealthy: the driver has GPUs, and does not list them any more. Hanging ranks Perdure finds itself.
HEALTHCHECK --interval=60s --timeout=30s \
    CMD test ! -e /dev/nvidiactl || nvidia-smi --list-gpus > /dev/null
ENTRYPOINT ["tini", "--", "perdure"]
CMD ["--help"]
