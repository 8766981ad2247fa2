"""What the processes of the tests do: each has an engine of its own, and ends with `os._exit`, by SIGKILL or not."""

import multiprocessing
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

# Of the server process that forks the others: it imports SGLang once.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["host_pools"])
PAGES = 6


def prompt(number):
    return list(range(1000 * number, 1000 * number + 4 * PAGES))


def expected(engine, number, seed=0):
    from host_pools import fill

    return [fill(engine.pools["kv"], 0, 1000 * number + seed + i) for i in range(PAGES)]


def _run(work, pipe, arguments):
    from host_pools import Engine, mha, mla

    pools = {"mha": mha, "mla": mla}
    with pytest.MonkeyPatch.context() as patch:

        def open_engine(kind, extra, **options):
            return Engine(patch, {"kv": pools[kind]()}, extra, **options)

        work(open_engine, pipe, *arguments)
        os._exit(0)


@contextmanager
def running(work, *arguments):
    """Run a function of this module in a process of its own; yield the process and a connection to it."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_run, args=(work, theirs, arguments))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def write(open_engine, pipe, extra, first):
    """Store prompts until the process is killed; report each that was stored."""
    engine = open_engine("mha", extra)
    for number in range(first, 1 << 30):
        assert engine.store(prompt(number)) == 4 * PAGES
        pipe.send(number)


def work_as_rank(open_engine, pipe, extra, rank):
    """Store and load prompts as one of two ranks, whose pages differ; report how many were loaded."""
    engine = open_engine("mha", extra, rank=rank, num_ranks=2)
    pipe.send("open")
    pipe.recv()
    num_loaded = 0
    for number in range(20):
        assert engine.store(prompt(number), seed=500 * rank) == 4 * PAGES
        num_tokens, pages = engine.load(prompt(number // 2))
        assert pages == expected(engine, number // 2, 500 * rank)
        num_loaded += num_tokens
    engine.close()
    pipe.send(num_loaded)


def write_latent(open_engine, pipe, extra):
    """Store a prompt of a latent model as the first of two ranks, and once more after `clear`."""
    engine = open_engine("mla", extra, num_ranks=2)
    for _ in range(2):
        pipe.send(engine.store(prompt(1)))
        if pipe.recv() == "clear":
            pipe.send(engine.storage.clear())
    pipe.recv()


def fill_disk(open_engine, pipe, extra):
    """Store prompts while a file may not grow further; report what was stored, then what can be loaded."""
    engine = open_engine("mha", extra)
    assert engine.store(prompt(0)) == 4 * PAGES
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    stored = [number for number in range(20) if engine.store(prompt(number)) == 4 * PAGES]
    loads = {number: engine.load(prompt(number)) for number in range(20)}
    assert all(pages == expected(engine, number)[: len(pages)] for number, (_, pages) in loads.items())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    pipe.send((stored, [number for number, (num_tokens, _) in loads.items() if num_tokens == 4 * PAGES]))
