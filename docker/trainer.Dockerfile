# What runs a plan's ranks on NVIDIA GPUs: planner, torch and the runner. One container a node, on the host's network:
#   docker build -f docker/trainer.Dockerfile -t polygon-train .
#   docker run --rm --gpus all --network host --ipc host -v "$PWD:/data" polygon-train \
#     --plan plan.json --dist-url tcp://HOST:9000 --world-size N --rank i
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM nvidia/cuda:12.8.1-base-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/polygon
ENV PATH=/opt/polygon/bin:$PATH
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
# torch brings the CUDA libraries that it was built with; the base gives the driver's interface.
# hadolint ignore=DL3013
RUN wheel=$(ls /wheels/*.whl) \
    && python -m pip install --no-cache-dir --constraint /wheels/constraints.txt "${wheel}[train]" \
    && rm -r /wheels \
    && useradd --uid 10001 --create-home trainer \
    && mkdir /data \
    && chown trainer /data
USER 10001
WORKDIR /data
ENTRYPOINT ["polygon", "dist-runner"]
CMD ["--help"]
