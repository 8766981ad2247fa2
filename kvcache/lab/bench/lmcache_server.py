"""LMCache's server on loopback over a folder, for comparisons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcache.lab.bench.servers import free_port, wait_for_port


@contextmanager
def running_lmcache(folder: Path, memory_bytes: int, chunk_tokens: int, log: Path) -> Iterator[dict[str, Any]]:
    """Run a server with memory and, below it, files in `folder` that pass the page cache by; stop it at the end.

    Yields vLLM's ``kv_transfer_config`` for it. OSError with the end of `log`: it does not start.
    """
    port, http_port = free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": http_port,
        "--l1-size-gb": memory_bytes / (1 << 30),
        "--eviction-policy": "LRU",
        "--chunk-size": chunk_tokens,
        # Without it, the server serves engines on CUDA only.
        "--supported-transfer-mode": "engine_driven",
        "--l2-adapter": json.dumps({"type": "fs_native", "base_path": str(folder), "use_odirect": True}),
    }
    words = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--no-l1-use-lazy", "--disable-observability"]
    words += [str(word) for option in options.items() for word in option]
    folder.mkdir(exist_ok=True)
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            try:
                # The HTTP server listens last.
                wait_for_port(http_port, lambda: process.poll() is not None)
            except OSError:
                raise OSError(f"LMCache's server did not start: {log.read_text(errors='replace')[-2000:]}") from None
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
        finally:
            process.terminate()
