"""Compiles and loads the simulated accelerator of late_device.cpp, and registers it with torch as the device "late"."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from kvcache.transfer import pinning

SOURCE = Path(__file__).with_name("late_device.cpp")
LIBRARIES = Path(torch.__file__).parent / "lib"
loaded: ctypes.CDLL | None = None


def build() -> Path | None:
    """Return the compiled device, from a cache if it is there; None without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kvcache-late-device-{os.getuid()}"
    folder.mkdir(0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", "-w", str(SOURCE), f"-L{LIBRARIES}"]
        command += [f"-I{path}" for path in include_paths()]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-Wl,-rpath,{LIBRARIES}"]
        command += ["-ltorch", "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=folder) as name:
            built = Path(name) / "device.so"
            subprocess.run([*command, "-o", str(built)], check=True)
            built.rename(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Make the compiled device the accelerator of this process."""
    global loaded
    late = loaded = ctypes.CDLL(str(library))
    for name, result, *arguments in (
        ("reset", None, ctypes.c_uint32, ctypes.c_double),
        ("race", ctypes.c_char_p),
        ("syncs", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("mapped", ctypes.c_int64),
        ("capacity", None, ctypes.c_int64),
        ("weight", None, ctypes.c_int64, ctypes.c_double),
        ("pending", ctypes.c_int64, ctypes.c_int64),
        ("capture", None, ctypes.c_int64, ctypes.c_bool),
        ("sleep", None, ctypes.c_int64),
        ("host_register", ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
        ("host_unregister", None, ctypes.c_size_t),
        ("host_touch", None, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool),
    ):
        function = getattr(late, f"late_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(late, name, function)
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", _Module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def lock(address: int, num_bytes: int, device: torch.device) -> str:
        code = late.host_register(address, num_bytes, device.index)
        return f"error {code}" if code else ""

    pinning.PLATFORMS["late"] = pinning.Pinning(lock, late.host_unregister, lambda: True)
    return late


class _Module:
    """The functions that torch asks a device's module for."""

    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: torch.accelerator.current_device_index())
    device_count = staticmethod(lambda: 2)
    get_amp_supported_dtype = staticmethod(list)
