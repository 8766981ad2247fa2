"""The compiled modules, the Cython directives that hold for all of them, and the version with the commit in it."""

import email
import os
import re
import subprocess
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

DEBUG = os.environ.get("KVCACHE_DEBUG") == "1"
SANITIZERS = os.environ.get("KVCACHE_SANITIZE", "")  # for the compiler: "address,undefined", or "thread"
COVERAGE = os.environ.get("KVCACHE_COVERAGE") == "1"  # counts lines of Cython that run, for gcov

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "auto_pickle": False,
    "autotestdict": False,
    # The lock of a table or filter is its critical section; the GIL may stay off.
    "freethreading_compatible": True,
}

# Each kind of build keeps its objects apart: none may be taken for another's up-to-date output. Sanitizers share the C.
KIND = "-".join(["debug"] * DEBUG + ["coverage"] * COVERAGE + SANITIZERS.split(",")).strip("-")
BUILD = Path("build", KIND)
OPTIMIZE = os.environ.get("KVCACHE_OPTIMIZE", "3")  # 0 and 1 compile in a quarter and half of the time
JOBS = int(os.environ.get("KVCACHE_BUILD_JOBS", "0"))

SOURCES = sorted(str(path) for path in Path("kvcache").rglob("*.pyx"))


def compiler_arguments() -> list[str]:
    if SANITIZERS:
        return ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZERS}"]
    if COVERAGE:
        return ["-O0", "--coverage"]
    return ["-O1", "-g"] if DEBUG else [f"-O{OPTIMIZE}"]


def extension(source: str) -> Extension:
    return Extension(
        source.removesuffix(".pyx").replace(os.sep, "."),
        [source],
        include_dirs=[str(Path("kvcache", "core"))],
        define_macros=[("KVCACHE_DEBUG", "1")] if DEBUG else [],
        extra_compile_args=compiler_arguments(),
        extra_link_args=[f"-fsanitize={SANITIZERS}"] * bool(SANITIZERS) + ["--coverage"] * COVERAGE,
    )


def git(*arguments: str) -> str:
    """Return what git prints about this folder; "" outside a checkout or without git."""
    if not Path(".git").exists():
        return ""  # as in an sdist, which may lie inside another repository
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version() -> str:
    """Return `kvcache.version.__version__`; a version under development ends in its commit.

    pip then replaces a build of one commit by that of another. An sdist states its version in PKG-INFO;
    KVCACHE_COMMIT names the commit where neither git nor PKG-INFO can. A release has no suffix: indexes refuse it.
    """
    base = VERSION_LINE.search(Path("kvcache", "version.py").read_text())[1]
    if ".dev" not in base:
        return base
    if Path("PKG-INFO").exists():
        return email.message_from_string(Path("PKG-INFO").read_text())["Version"]
    commit = os.environ.get("KVCACHE_COMMIT") or git("rev-parse", "--short=9", "HEAD")
    if not commit:
        return base
    is_changed = "KVCACHE_COMMIT" not in os.environ and git("status", "--porcelain", "--untracked-files=no")
    return f"{base}+g{commit}{'.dirty' if is_changed else ''}"


VERSION_LINE = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
VERSION = version()


class BuildPy(build_py):
    """Copies the Python files; the built `kvcache/version.py` states the version with the commit."""

    def build_module(self, module, module_file, package):
        copied = super().build_module(module, module_file, package)
        if (package, module) == ("kvcache", "version"):
            built = Path(self.get_module_outfile(self.build_lib, package.split("."), module))
            built.write_text(VERSION_LINE.sub(f'__version__ = "{VERSION}"', built.read_text()))
        return copied


BUILD.mkdir(parents=True, exist_ok=True)
setup(
    version=VERSION,
    cmdclass={"build_py": BuildPy},
    ext_modules=cythonize(
        [extension(source) for source in SOURCES],
        compiler_directives=DIRECTIVES,
        build_dir=str(Path("build", "debug" * DEBUG, "coverage" * COVERAGE, "cython")),
        emit_linenums=COVERAGE,
        nthreads=JOBS,
    ),
    options={
        "build": {"build_base": str(BUILD)},
        "build_ext": {"parallel": JOBS or None},
        "egg_info": {"egg_base": str(BUILD)},
    },
)
