"""An engine in a process of its own, for tests of engines that run at one time."""

import multiprocessing
import os
from contextlib import contextmanager


def scale(model):
    """Update the weights in place; the engine may have packed those of its matrices."""
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.mul_(-2)


def _serve(pipe, model, extra_config):
    from conftest import Engine

    engine = Engine(model, extra_config)
    pipe.send(os.getpid())
    while (call := pipe.recv()) is not None:
        name, arguments = call
        if name == "scale":
            pipe.send(engine.llm.apply_model(scale) and None)
        elif name == "owner_figures":
            pipe.send(engine.manager._manager.owner_figures())
        else:
            pipe.send(getattr(engine, name)(*arguments))
    engine.close()


class EngineProcess:
    """Calls methods of `conftest.Engine`, `scale`, and `owner_figures` of a node manager, in another process, `pid`."""

    def __init__(self, pipe):
        self._pipe = pipe
        self.pid = pipe.recv()

    def call(self, name, *arguments):
        self._pipe.send((name, arguments))
        return self._pipe.recv()


@contextmanager
def running(model, extra_config):
    """Start an engine, and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, model, extra_config), daemon=True)
    process.start()
    theirs.close()
    try:
        yield EngineProcess(ours)
        ours.send(None)
        process.join(60)
    finally:
        process.kill()
        process.join()
