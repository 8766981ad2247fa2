# The planner: `kvcache plan` and `kvcache replay`, without torch and without an engine.
#   docker build --file examples/containers/planner.Dockerfile --tag kvcache-planner .
#   docker run --rm --volume "$PWD:/data" kvcache-planner plan trace.jsonl --memory 64GiB,256GiB --model llama-3.1-8b
FROM python:3.12-slim

COPY constraints.txt dist/kvcache-*-cp312-cp312-*.whl /tmp/wheels/
RUN python -m pip install --no-cache-dir --constraint /tmp/wheels/constraints.txt \
        matplotlib msgspec numpy rich typer xxhash zstandard \
    && python -m pip install --no-cache-dir --no-deps /tmp/wheels/*.whl \
    && rm -r /tmp/wheels \
    && useradd --uid 1000 --create-home planner

USER 1000
WORKDIR /data
ENTRYPOINT ["kvcache"]
CMD ["--help"]
