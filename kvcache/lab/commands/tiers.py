"""Parse the simulated tiers of `--tier`, and the rates and prices of `--serving`."""

from __future__ import annotations

import re

from kvcache.lab.simulate.choices import ServingChoice, TierChoice
from kvcache.options import parse_count, parse_size
from kvcache.registry import POLICIES
from kvcache.tiering.controller import WRITE_POLICIES
from kvcache.tiers.base.wear import parse_endurance

_TIER = re.compile(r"(?:(?P<name>[^:@]+):)?(?P<sizes>[^:@]+)@(?P<rate>[^:@,]+)(?P<rules>(?:,[^:@,]+)*)")
_POLICY, _ENDURANCE = "cache_policy=", "endurance="


def parse_rate(option: str, text: str) -> float:
    """Return the bytes per second of a rate such as ``6GB/s``."""
    size, slash, unit = text.strip().rpartition("/")
    if not slash or unit.strip() != "s":
        raise ValueError(f"{option} must be a rate such as 6GB/s, got {text!r}")
    return float(parse_size(option, size))


def parse_tiers(texts: list[str] | None) -> list[TierChoice]:
    """Return the tiers that the options name, the first one to query in front."""
    tiers: list[TierChoice] = []
    for number, text in enumerate(texts or (), 1):
        if text.lstrip().startswith("{"):
            raise ValueError(f"--tier of a plan is simulated: SIZE@RATE; kvcache replay takes a real one, got {text!r}")
        match = _TIER.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"--tier must be SIZE@RATE, as in 1TiB@6GB/s or nvme:1TiB@6GB/s,write_back, got {text!r}")
        sizes = sorted({parse_size("--tier", part) for part in match["sizes"].split(",")})
        name = (match["name"] or f"tier {number}").strip()
        if name in [tier.name for tier in tiers]:
            raise ValueError(f"--tier {name!r} is named twice")
        # Remove rules with a value first: each of the others must be a known word.
        rules = [rule.strip() for rule in match["rules"].split(",")[1:]]
        own = [rule.removeprefix(_POLICY) for rule in rules if rule.startswith(_POLICY)]
        worn = [rule.removeprefix(_ENDURANCE) for rule in rules if rule.startswith(_ENDURANCE)]
        rules = [rule for rule in rules if not rule.startswith((_POLICY, _ENDURANCE))]
        for policy in own:
            POLICIES.resolve(policy)
        for rule in rules:
            if rule != "arbiter" and rule not in WRITE_POLICIES:
                known = ", ".join(["arbiter", *WRITE_POLICIES, f"{_POLICY}NAME", f"{_ENDURANCE}DRIVE_WRITES"])
                raise ValueError(f"--tier takes {known} behind the rate, got {rule!r} in {text!r}")
        policies = [rule for rule in rules if rule != "arbiter"]
        for kind, named in (("write policy", policies), ("cache_policy", own), ("endurance", worn)):
            if len(named) > 1:
                raise ValueError(f"--tier takes one {kind}, got {text!r}")
        tiers.append(
            TierChoice(
                name,
                tuple(sizes),
                parse_rate("--tier", match["rate"]),
                policies[0] if policies else "write_through",
                "arbiter" in rules,
                own[0] if own else "lru",
                parse_endurance("--tier endurance", worn[0]) if worn else None,
            )
        )
    return tiers


def parse_serving(text: str | None, num_media: int) -> ServingChoice:
    """Parse ``engines=4,link=50GB/s,price=4/0.1``; the prices are for host memory and each tier."""
    engines, link_bytes_per_s = None, 50e9
    prices: tuple[float | None, ...] = (None,) * num_media
    for part in text.split(",") if text else ():
        key, _, value = part.strip().partition("=")
        if key == "engines":
            engines = parse_count("--serving engines", value)
        elif key == "link":
            link_bytes_per_s = parse_rate("--serving link", value)
        elif key == "price":
            prices = tuple(_price(one, value) for one in value.split("/"))
            if len(prices) != num_media:
                raise ValueError(
                    f"--serving price must name one price for host memory and one for each tier, as in 4/0.1 for one "
                    f"tier, got {value!r} for {num_media - 1} tiers"
                )
        else:
            raise ValueError(f"--serving takes engines=N, link=RATE and price=HOST/TIER/..., got {part!r}")
    return ServingChoice(engines, link_bytes_per_s, prices)


def _price(text: str, whole: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ValueError(f"--serving price must be numbers >= 0, got {whole!r}")
    return price
