# vLLM with kvcache. Build it at the root of a checkout, after `make release` has put the wheels into dist/:
#   docker build --file examples/containers/vllm.Dockerfile --tag vllm-kvcache .
# CPYTHON is the Python of the base image: 312 for CPython 3.12.
ARG VLLM_VERSION=v0.33.0
FROM vllm/vllm-openai:${VLLM_VERSION}

ARG CPYTHON=312
COPY dist/kvcache-*-cp${CPYTHON}-cp${CPYTHON}-*.whl /tmp/wheels/
# The image brings torch and numpy: pip installs only what is missing.
RUN python3 -m pip install --no-cache-dir "$(echo /tmp/wheels/*.whl)[cli,disk,valkey]" \
    && rm -r /tmp/wheels \
    && kvcache --version
