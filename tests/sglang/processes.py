"""Engines in processes of their own; each is ended by `os._exit` or SIGKILL."""

import multiprocessing
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from host_pools import Engine, fill, mha, mla

# The server process that forks the others imports SGLang once.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["processes"])
PAGES = 6
TOKENS = 4 * PAGES


def prompt(number):
    return list(range(1000 * number, 1000 * number + TOKENS))


def load_right(engine, number, seed=0):
    """Load a prompt, compare its pages, and return how many tokens came."""
    num_tokens, pages = engine.load(prompt(number))
    assert pages == [fill(engine.pools["kv"], 0, 1000 * number + seed + i) for i in range(len(pages))]
    return num_tokens


def _run(work, pipe, arguments):
    with pytest.MonkeyPatch.context() as patch:
        work(partial(Engine, patch), pipe, *arguments)
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


def work_as_rank(open_engine, pipe, extra, rank):
    """Store and load prompts as one of two ranks, whose pages differ; report how many tokens were loaded."""
    engine = open_engine({"kv": mha()}, extra, rank=rank, num_ranks=2)
    pipe.send(engine.load(prompt(0))[0])
    pipe.recv()
    stored = [engine.store(prompt(number), seed=500 * rank) for number in range(20)]
    pipe.send([*stored, *(load_right(engine, number, 500 * rank) for number in range(20))])


def write_latent(open_engine, pipe, extra):
    """Store a prompt of a latent model as the first of two ranks."""
    engine = open_engine({"kv": mla()}, extra, num_ranks=2)
    pipe.send(engine.store(prompt(1)))
    pipe.recv()
