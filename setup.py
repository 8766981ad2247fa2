"""The compiled modules and the Cython directives that hold for all of them."""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("KVCACHE_DEBUG") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "auto_pickle": False,
    "autotestdict": False,
}

# A debug build keeps its objects apart: neither kind may be taken for the other's up-to-date output.
BUILD = Path("build", "debug") if DEBUG else Path("build")
JOBS = int(os.environ.get("KVCACHE_BUILD_JOBS", "0"))

SOURCES = sorted(str(path) for path in Path("kvcache").rglob("*.pyx"))


def extension(source: str) -> Extension:
    return Extension(
        source.removesuffix(".pyx").replace(os.sep, "."),
        [source],
        include_dirs=[str(Path("kvcache", "core"))],
        define_macros=[("KVCACHE_DEBUG", "1")] if DEBUG else [],
        extra_compile_args=["-O1", "-g"] if DEBUG else ["-O3"],
    )


setup(
    ext_modules=cythonize(
        [extension(source) for source in SOURCES],
        compiler_directives=DIRECTIVES,
        build_dir=str(BUILD / "cython"),
        nthreads=JOBS,
    ),
    options={"build": {"build_base": str(BUILD)}, "build_ext": {"parallel": JOBS or None}},
)
