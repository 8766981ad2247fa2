"""Choose the cheapest cell of a plan that reaches the targets of ``--target``: what to buy, in one line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvcache.lab.simulate.cells import OPTIMUM

if TYPE_CHECKING:
    from kvcache.lab.simulate.cells import Cell
    from kvcache.lab.simulate.plan import Result

WRITES = "dwpd"
TARGETS = ("ttft_mean", "ttft_p50", "ttft_p99", WRITES)


def parse_targets(text: str | None) -> dict[str, float]:
    """Parse ``ttft_p99=0.12,dwpd=3``: seconds to the first token, and drive writes a day. Raise ValueError if invalid.

    >>> parse_targets("ttft_p99=0.12,dwpd=3")
    {'ttft_p99': 0.12, 'dwpd': 3.0}
    """
    targets: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            targets[name] = float(value)
        except ValueError:
            targets[name] = math.nan
        if name not in TARGETS or not 0 < targets[name] < math.inf:
            raise ValueError(f"--target takes numbers > 0 for {', '.join(TARGETS)}, as in ttft_p99=0.12, got {part!r}")
    return targets


def figure_of(cell: Cell, name: str) -> float | None:
    """Return a cell's figure for a target; of drive writes, those of the tier that is written most."""
    serving: dict[str, Any] = cell.serving or {}
    if name == WRITES:
        writes = [medium.get("drive_writes_per_day") for medium in serving.get("media", ())[1:]]
        return max((value for value in writes if value is not None), default=0.0)
    value: float | None = serving.get(f"{name}_s")
    return value


def recommend(result: Result, targets: dict[str, float]) -> dict[str, Any]:
    """Return the cell to buy, whether it reaches all targets, why it was chosen, and the best cell of each policy.

    It is the cheapest cell that reaches them; without prices, the one with the least memory, and then the smallest
    tiers. If no cell reaches them, it is the one whose worst figure exceeds its target by the smallest factor. Of equal
    cells, it is the one with the shortest mean time to first token, and then with the most hits.
    """
    rated: list[tuple[Any, ...]] = []
    for cell in result.cells:
        figures = {name: figure_of(cell, name) for name in targets}
        if cell.policy == OPTIMUM or any(value is None for value in figures.values()):
            continue
        excess = max((figures[name] or 0.0) / target for name, target in targets.items())
        serving = cell.serving or {}
        price, ttft_s = serving.get("price"), serving.get("ttft_mean_s")
        cost = (price if price is not None else 0.0, cell.num_blocks or 0, sum(cell.tiers))
        rank = (excess > 1, max(excess, 1.0), cost, math.inf if ttft_s is None else ttft_s, -cell.block_hit_rate)
        rated.append((rank, len(rated), figures, cell))
    rated.sort()
    if not rated:
        return {"cell": None, "reached": False, "figures": {}, "why": "", "best": []}
    (is_missed, excess, cost, *_), _, figures, cell = rated[0]
    same = [other for rank, _, _, other in rated if rank[:3] == rated[0][0][:3]]
    why = f"exceeds a target by the smallest factor, {excess:.3g}"
    if not is_missed:
        why = f"cheapest of the {sum(not one[0][0] for one in rated)} lines that reach the targets"
    if len(same) > 1:
        why += f"; {len(same)} lines cost the same, this one has the shortest mean TTFT, or else the most hits"
    best = {cell.policy: cell for _, _, _, cell in reversed(rated)}
    return {"cell": cell, "reached": not is_missed, "figures": figures, "why": why, "best": list(best.values())[::-1]}
