# The image of a training run on CPUs, or with EXTRA=train,cuda13 on NVIDIA GPUs:
#   docker build -t jdist .
#   docker build -t jdist-cuda --build-arg EXTRA=train,cuda13 .
#   docker build -t jdist-ray --build-arg EXTRA=train,ray .
# `jdist launch --print kubernetes|kuberay|slurm --image jdist` runs it.
FROM python:3.13-slim
ARG EXTRA=train
WORKDIR /src
COPY . .
# The versions and hashes are those of EXTRA=train; the other extras add to them.
RUN pip install --no-cache-dir --require-hashes -r constraints.txt \
  && pip install --no-cache-dir ".[${EXTRA}]" && useradd --create-home jdist
USER jdist
WORKDIR /home/jdist
ENTRYPOINT ["jdist"]
