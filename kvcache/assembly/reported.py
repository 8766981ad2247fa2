"""One sample of every metric that an engine can report, made without an engine.

vLLM declares metrics before it makes a manager.
"""

from __future__ import annotations

from kvcache.core.histogram import Histogram
from kvcache.metrics import (
    CALL_EXPONENTS,
    JOB_EXPONENTS,
    CallStats,
    EventStats,
    EvictionStats,
    HintStats,
    HistogramData,
    ManagerStats,
    NodeStats,
    Part,
    PolicyStats,
    Sample,
    TransferStats,
    samples_of,
)
from kvcache.tiering.controller import TierControllerStats
from kvcache.tiering.pending import PromotionStats
from kvcache.tiers.base.tier import CodecTierStats


def every_sample(with_transfers: bool = True) -> list[Sample]:
    """Return a sample of every metric that a manager, and a worker, can report, with the labels that it has.

    Values are zero; histograms have the bounds that they will have.
    """
    calls, jobs = (HistogramData(*Histogram(1e-9, *exponents).data()) for exponents in (CALL_EXPONENTS, JOB_EXPONENTS))
    ages = HistogramData(*Histogram(1e-2, 0, 26).data())
    sizes = HistogramData(*Histogram(1.0, *JOB_EXPONENTS).data())
    tier = TierControllerStats(CodecTierStats("DISK", 0, 0), promotion_seconds=jobs, write_seconds=jobs)
    parts = [
        Part("", ManagerStats()),
        Part("policy", PolicyStats(0.0), (("name", "t1_blocks"),)),
        Part("call", CallStats(calls), (("call", "lookup"),)),
        Part("eviction", EvictionStats(ages)),
        Part("event", EventStats()),
        Part("hint", HintStats(), (("type", "kv.prefetch"),)),
        Part("promotion", PromotionStats(0, jobs)),
        Part("node", NodeStats()),
        Part("tier", tier, (("tier", "0"), ("medium", "DISK"))),
    ]
    if with_transfers:
        labels = (("source", "GPU"), ("destination", "CPU"))
        parts.append(Part("transfer", TransferStats(0, 0, 0, jobs, sizes), labels))
    return [sample for part in parts for sample in samples_of(part, block_size=1, block_bytes=1)]
