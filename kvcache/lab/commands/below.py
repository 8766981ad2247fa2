"""Read from text which tiers lie below host memory in a simulation, and how fast and dear each medium is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from kvcache.options import parse_size

_TIER = re.compile(r"(?:(?P<name>[^:@]+):)?(?P<sizes>[^:@]+)@(?P<rate>[^:@]+)")


@dataclass(frozen=True, slots=True)
class TierChoice:
    """One tier: what it is called, the capacities to try, and how fast it loads."""

    name: str
    capacities_bytes: tuple[int, ...]
    bytes_per_s: float


def parse_rate(option: str, text: str) -> float:
    """Return the bytes per second that `text` says, as in ``6GB/s``; ValueError otherwise."""
    size, slash, unit = text.strip().rpartition("/")
    if not slash or unit.strip() != "s":
        raise ValueError(f"{option} must be a rate such as 6GB/s, got {text!r}")
    return float(parse_size(option, size))


def parse_tiers(texts: list[str] | None) -> list[TierChoice]:
    """Return the tiers that the options name, the first to be asked first."""
    tiers: list[TierChoice] = []
    for number, text in enumerate(texts or (), 1):
        match = _TIER.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"--tier must be SIZE@RATE, as in 1TiB@6GB/s or nvme:1TiB@6GB/s, got {text!r}")
        sizes = sorted({parse_size("--tier", part) for part in match["sizes"].split(",")})
        name = (match["name"] or f"tier {number}").strip()
        if name in [tier.name for tier in tiers]:
            raise ValueError(f"--tier {name!r} is named twice")
        tiers.append(TierChoice(name, tuple(sizes), parse_rate("--tier", match["rate"])))
    return tiers


def parse_prices(text: str | None, num_media: int) -> list[float | None]:
    """Return the prices of host memory and the tiers, None where none are given."""
    if text is None:
        return [None] * num_media
    prices: list[float | None] = []
    for part in text.split(","):
        try:
            price = float(part)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise ValueError(f"--price must be numbers >= 0, got {text!r}")
        prices.append(price)
    if len(prices) != num_media:
        raise ValueError(f"--price must name one price for host memory and one for each tier, got {text!r}")
    return prices


def stacks_of(tiers: list[TierChoice], block_bytes: int) -> list[tuple[int, ...]]:
    """Return the stacks to compare, in blocks: host memory alone, then one tier more each time, in all capacities."""
    stacks: list[tuple[int, ...]] = []
    for depth in range(len(tiers) + 1):
        for sizes in product(*(tier.capacities_bytes for tier in tiers[:depth])):
            blocks = tuple(size // block_bytes for size in sizes)
            if 0 in blocks:
                raise ValueError(f"--tier must hold at least one block of {block_bytes} bytes, got {min(sizes)} bytes")
            stacks.append(blocks)
    return stacks
