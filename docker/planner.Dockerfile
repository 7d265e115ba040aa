# The planner and its page: no torch, no GPU.
#   docker build -f docker/planner.Dockerfile -t polygon .
#   docker run --rm --user "$(id -u)" -v "$PWD:/data" polygon search --cluster lab.yaml --model llama2-7b --global-batch 256 -o plan.json
#   docker run --rm -p 127.0.0.1:5000:5000 -v polygon:/data polygon serve --host 0.0.0.0 --token SECRET
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
# Kernels come compiled: by what the wheel needs itself.
# hadolint ignore=DL3013
RUN python -m pip install --no-cache-dir "setuptools>=77" wheel . \
    && POLYGON_SHIP_KERNELS=1 python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=wheel /wheels /wheels
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The wheel is this checkout's; what it needs is in its metadata.
# hadolint ignore=DL3013
RUN wheel=$(ls /wheels/*.whl) \
    && python -m pip install --no-cache-dir "${wheel}[web,plots]" \
    && rm -r /wheels \
    && useradd --uid 10001 --create-home planner \
    && mkdir /data \
    && chown planner /data
USER 10001
WORKDIR /data
EXPOSE 5000
ENTRYPOINT ["polygon"]
CMD ["--help"]
