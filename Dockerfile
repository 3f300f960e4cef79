# docker build -t perdure .
# docker run --gpus all --ipc=host -v $PWD/data:/perdure/data -v $PWD/runs:/perdure/runs perdure \
#   --standalone --nproc-per-node gpu -m trainer recipes/qwen3_0_6b.yaml
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/perdure/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/perdure

# The largest layer first, and alone: it changes least. gcc above is for torch.compile.
ARG TORCH=torch==2.11.0
RUN pip install "$TORCH"

WORKDIR /perdure
COPY pyproject.toml README.md LICENSE ./
COPY trainer trainer
COPY elastic elastic
COPY checkpointing checkpointing
RUN pip install '.[all]'
COPY recipes recipes

RUN useradd --create-home perdure && mkdir data runs && chown perdure data runs .
USER perdure
ENTRYPOINT ["torchrun"]
CMD ["--help"]
