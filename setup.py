"""The compiled modules and the Cython directives that hold for all of them."""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("KVCACHE_DEBUG") == "1"
SANITIZERS = os.environ.get("KVCACHE_SANITIZE", "")  # for the compiler: "address,undefined", or "thread"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "auto_pickle": False,
    "autotestdict": False,
    # The lock of a table, filter or sampler is its critical section; the GIL may stay off.
    "freethreading_compatible": True,
}

# Each kind of build keeps its objects apart: none may be taken for another's up-to-date output. Sanitizers share the C.
KIND = "-".join(["debug"] * DEBUG + SANITIZERS.split(",")).strip("-")
BUILD = Path("build", KIND)
OPTIMIZE = os.environ.get("KVCACHE_OPTIMIZE", "3")  # 0 and 1 compile in a quarter and half of the time
JOBS = int(os.environ.get("KVCACHE_BUILD_JOBS", "0"))

SOURCES = sorted(str(path) for path in Path("kvcache").rglob("*.pyx"))


def compiler_arguments() -> list[str]:
    if SANITIZERS:
        return ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZERS}"]
    return ["-O1", "-g"] if DEBUG else [f"-O{OPTIMIZE}"]


def extension(source: str) -> Extension:
    return Extension(
        source.removesuffix(".pyx").replace(os.sep, "."),
        [source],
        include_dirs=[str(Path("kvcache", "core"))],
        define_macros=[("KVCACHE_DEBUG", "1")] if DEBUG else [],
        extra_compile_args=compiler_arguments(),
        extra_link_args=[f"-fsanitize={SANITIZERS}"] if SANITIZERS else [],
    )


BUILD.mkdir(parents=True, exist_ok=True)
setup(
    ext_modules=cythonize(
        [extension(source) for source in SOURCES],
        compiler_directives=DIRECTIVES,
        build_dir=str(Path("build", "debug" * DEBUG, "cython")),
        nthreads=JOBS,
    ),
    options={
        "build": {"build_base": str(BUILD)},
        "build_ext": {"parallel": JOBS or None},
        "egg_info": {"egg_base": str(BUILD)},
    },
)
