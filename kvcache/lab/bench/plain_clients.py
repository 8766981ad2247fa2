"""A plain loop over the same blocks with a medium's own client, as a baseline for a tier."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks


class PlainValkey:
    """``client.set`` and ``client.get`` of `bytes`; loaded values are dropped."""

    def __init__(self, options: Mapping[str, Any], host_blocks: HostBlocks) -> None:
        valkey = importlib.import_module("valkey")
        make = valkey.ValkeyCluster if options.get("cluster") else valkey.Valkey
        given = {name: options[name] for name in ("username", "password") if name in options}
        if "ca_file" in options:
            given["ssl_ca_certs"] = options["ca_file"]
        self._client = make.from_url(options["url"], **given)
        self._values = [row.tobytes() for row in host_blocks]

    def put(self, names: Sequence[bytes]) -> None:
        for name, value in zip(names, self._values, strict=False):
            self._client.set(name, value)

    def fetch(self, names: Sequence[bytes]) -> None:
        for name in names:
            if self._client.get(name) is None:
                raise OSError(f"the server does not hold {name!r} any more: give it more memory, or measure less")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._client.delete(name)

    def close(self) -> None:
        self._client.close()


class PlainMooncake:
    """``put_from`` and ``get_into`` with the host blocks themselves."""

    def __init__(self, options: Mapping[str, Any], host_blocks: HostBlocks) -> None:
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        here = options.get("hostname", options["master"].rpartition(":")[0])
        protocol, device = options.get("protocol", "tcp"), options.get("device", "")
        metadata_server = options.get("metadata_server", "P2PHANDSHAKE")
        if self._store.setup(here, metadata_server, 0, 1 << 20, protocol, device, options["master"]) != 0:
            raise OSError(f"no Mooncake master answers at {options['master']}")
        self._size = host_blocks.shape[1]
        self._addresses = [int(row.ctypes.data) for row in host_blocks]
        self._store.register_buffer(self._addresses[0], host_blocks.nbytes)

    def put(self, names: Sequence[bytes]) -> None:
        for name, address in zip(names, self._addresses, strict=False):
            if (answer := self._store.put_from(name.hex(), address, self._size)) != 0:
                raise OSError(f"the store did not take a block ({answer}): lend it more memory, or measure less")

    def fetch(self, names: Sequence[bytes]) -> None:
        for name, address in zip(names, self._addresses, strict=False):
            if (answer := self._store.get_into(name.hex(), address, self._size)) != self._size:
                raise OSError(f"the store did not return a block ({answer})")

    def remove(self, names: Sequence[bytes]) -> None:
        self._store.batch_remove([name.hex() for name in names], True)

    def close(self) -> None:
        self._store.close()


def plain_client(options: Mapping[str, Any], host_blocks: HostBlocks) -> PlainValkey | PlainMooncake | None:
    """Return the plain client of the medium that a tier's entry names; None: the tier is measured alone."""
    match options.get("type"):
        case "valkey":
            return PlainValkey(options, host_blocks)
        case "mooncake":
            return PlainMooncake(options, host_blocks)
    return None
