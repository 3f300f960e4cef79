# docker build -t perdure .
# docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#   -v "$PWD/data:/perdure/data" -v "$PWD/runs:/perdure/runs" perdure \
#   --standalone --nproc-per-node gpu -m trainer recipes/qwen3_0_6b.yaml
# --user: what is written into mounted folders belongs to you. Make them before docker does, as root.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ \
 && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/perdure/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/perdure

# The largest layer first, and alone: it changes least. g++ above is for torch.compile.
ARG TORCH=torch==2.13.0
RUN pip install $TORCH

WORKDIR /perdure
COPY pyproject.toml README.md LICENSE setup.py perdure.py ./
COPY trainer trainer
COPY elastic elastic
COPY checkpointing checkpointing
COPY lab lab
COPY recipes recipes
RUN pip install '.[all]'

# Any user may run it, also one without a name: torch asks for name and home to place its caches.
ENV USER=perdure HOME=/perdure/home
RUN mkdir -m 1777 home data runs && chmod 1777 .
USER 1000:1000
ENTRYPOINT ["torchrun"]
CMD ["--help"]
