"""Stand-ins for packages that SGLang imports and host pools and controllers on a CPU do not use."""

import importlib.abc
import importlib.machinery
import sys
import types

import transformers.models.auto.processing_auto  # noqa: F401  (it looks for torchvision)

# Only SGLang's test kit imports the last two, to read data sets and chat templates.
EMPTY = {"IPython", "torchvision", "gguf", "datasets", "sglang.srt.parser.reasoning_parser"}


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in EMPTY or name.partition(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
