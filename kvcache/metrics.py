"""Counters, gauges, histograms and states: the one table from which all exporters, the dashboard and the docs are made.

A field of a statistics class carries its own line of the table (`counter`, `gauge`, `histogram`, `state`, `flag`), so
that a name, its unit and its help stand in one place. Stats, exporters, dashboards and the docs' table read them back
(`metrics_of`, `samples_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

Labels = tuple[tuple[str, str], ...]
CALL_EXPONENTS = (9, 30)
"""Of two, in nanoseconds: the bounds of histograms of calls, half a microsecond to a second."""
JOB_EXPONENTS = (17, 36)
"""The same for jobs and waits: an eighth of a millisecond to a minute."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Parameters
    ----------
    name : str
        The field of the statistics class, and the attribute of the pool that it is read from.
    kind : str
        ``"counter"`` (since start, only grows), ``"gauge"`` (now), ``"histogram"`` (since start), ``"state"`` (one word
        of several) or ``"flag"`` (a text that is empty while all is well).
    unit : str
        The unit: ``"blocks"``, ``"calls"``, ``"requests"``, ``"jobs"``, ``"seconds"``, ``"bytes"``.
    help : str
        One sentence.
    reading : str
        How to use it, where that is not plain.
    exported : str
        The name that exporters give it, without prefix.
    is_sized : bool
        Whether exporters also give it in tokens and bytes.
    states : tuple of str
        The words of a state.
    """

    name: str
    kind: str
    unit: str
    help: str
    reading: str = ""
    exported: str = ""
    is_sized: bool = False
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramData:
    """A histogram as it was at one moment.

    Parameters
    ----------
    bounds : tuple of float
        Upper bounds of the buckets, ascending, in the metric's unit; one more bucket is above the last.
    counts : tuple of int
        Observations per bucket, one more than bounds.
    sum : float
        Of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the bound that at least this share of the observations lies within; 0.0 without any.

        Parameters
        ----------
        share : float
            0 to 1.

        Returns
        -------
        float
            In the metric's unit; infinite where it lies above the last bound.
        """
        rest = share * self.count
        if not rest:
            return 0.0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            rest -= count
            if rest <= 0:
                return bound
        return float("inf")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value under the name that exporters give it.

    Parameters
    ----------
    name : str
        Without prefix; a counter's without ``_total``.
    kind : str
        ``"counter"``, ``"gauge"`` or ``"histogram"``.
    help : str
        One sentence.
    value : float or HistogramData
        The value.
    labels : tuple of (str, str)
        Names and values of labels.
    """

    name: str
    kind: str
    help: str
    value: float | HistogramData
    labels: Labels = ()


def counter(unit: str, text: str, reading: str = "", *, exported: str = "", is_sized: bool = False) -> Any:
    """Return a dataclass field, 0 by default, that is a counter since start."""
    return _field(0, Metric("", "counter", unit, text, reading, exported, is_sized))


def gauge(unit: str, text: str, *, exported: str = "", is_sized: bool = False) -> Any:
    """Return a dataclass field, 0 by default, that is a gauge of now."""
    return _field(0, Metric("", "gauge", unit, text, exported=exported, is_sized=is_sized))


def histogram(unit: str, text: str, reading: str = "") -> Any:
    """Return a dataclass field, None by default, that holds a `HistogramData`."""
    return _field(None, Metric("", "histogram", unit, text, reading))


def state(text: str, states: tuple[str, ...], *, exported: str) -> Any:
    """Return a dataclass field, the first state by default, that is one of `states`."""
    return _field(states[0], Metric("", "state", "state", text, exported=exported, states=states))


def flag(text: str, *, exported: str) -> Any:
    """Return a dataclass field, empty by default, for the text of a fault."""
    return _field("", Metric("", "flag", "0 or 1", text, exported=exported))


def _field(default: Any, metric: Metric) -> Any:
    return field(default=default, metadata={"metric": metric})


@cache
def metrics_of(stats: type) -> tuple[Metric, ...]:
    """Return the table's lines of a statistics class, in the order of its fields."""
    metrics = []
    for declared in fields(stats):
        metric = declared.metadata.get("metric")
        if metric is not None:
            metrics.append(replace(metric, name=declared.name, exported=metric.exported or declared.name))
    return tuple(metrics)


@dataclass(frozen=True, slots=True)
class Part:
    """The statistics of one component, as one snapshot holds them.

    Parameters
    ----------
    name : str
        Its kind, and the prefix of its exported names: ``"tier"``; empty for the manager.
    stats : object
        An instance of a statistics class.
    labels : tuple of (str, str)
        Labels that distinguish it from others of its kind.
    """

    name: str
    stats: Any
    labels: Labels = ()


def samples_of(part: Part, block_size: int = 0, block_bytes: int = 0) -> Iterator[Sample]:
    """Yield the samples of one component, and of the statistics that its own hold.

    Parameters
    ----------
    part : Part
        The component.
    block_size, block_bytes : int
        Tokens and bytes of one block; 0: not known, then nothing is given in them.
    """
    start = f"{part.name}_" if part.name else ""
    stats: type = type(part.stats)
    for metric in metrics_of(stats):
        value = getattr(part.stats, metric.name)
        if value is None:
            continue
        name = start + metric.exported
        if metric.kind == "state":
            for word in metric.states:
                yield Sample(name, "gauge", metric.help, float(value == word), (*part.labels, ("state", word)))
            continue
        if metric.kind == "flag":
            value = float(bool(value))
        yield Sample(name, "gauge" if metric.kind == "flag" else metric.kind, metric.help, value, part.labels)
        if metric.is_sized:
            # Exported in all units, so that a dashboard needs to know nothing of the blocks.
            for unit, factor in (("tokens", block_size), ("bytes", block_bytes)):
                if factor:
                    sized = name.removesuffix("blocks") + unit
                    text = f"{metric.help.removesuffix('.')}, in {unit}."
                    yield Sample(sized, metric.kind, text, value * factor, part.labels)
    for declared in fields(part.stats):
        within = getattr(part.stats, declared.name)
        if "metric" not in declared.metadata and is_dataclass(within):
            yield from samples_of(replace(part, stats=within), block_size, block_bytes)


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Counters since start and gauges now of one pool; `kvcache.metrics.MANAGER_METRICS` describes each."""

    num_blocks: int = gauge("blocks", "Blocks that the pool holds.", exported="capacity_blocks", is_sized=True)
    num_free: int = gauge("blocks", "Slots that hold no block.", exported="free_blocks")
    num_referenced: int = gauge("blocks", "Blocks that are being loaded, or held for it.", exported="referenced_blocks")
    num_pending: int = gauge("blocks", "Blocks that are being written.", exported="pending_blocks")
    lookups: int = counter("calls", "Calls of lookup.")
    looked_up_blocks: int = counter(
        "blocks",
        "Blocks that lookup was asked for.",
        "An engine that asks key by key stops at the first miss: use needed_blocks for ratios.",
    )
    hit_blocks: int = counter("blocks", "Blocks that lookup found ready.")
    loaded_blocks: int = counter("blocks", "Blocks handed out to be loaded.", is_sized=True)
    stored_blocks: int = counter("blocks", "Blocks that were written and became ready.", is_sized=True)
    evicted_blocks: int = counter("blocks", "Blocks that made room for others.", is_sized=True)
    rejected_stores: int = counter("calls", "Stores that were refused because no room could be made.")
    failed_blocks: int = counter("blocks", "Blocks dropped because their write failed.")
    gated_blocks: int = counter("blocks", "Blocks that were offered and not admitted.")
    declined_blocks: int = counter("blocks", "Of the gated blocks, those that the policy did not take.")
    ignored_hints: int = counter("requests", "Requests with a hint that was ignored, in whole or in part.")
    promoted_loads: int = counter(
        "blocks",
        "Of the loaded blocks, those that a tier had to bring back for the request.",
        "rate(loaded_blocks) - rate(promoted_loaded_blocks) is what host memory hit by itself.",
        exported="promoted_loaded_blocks",
        is_sized=True,
    )
    needed_blocks: int = counter(
        "blocks",
        "Blocks of requests that the device did not hold: loaded, or computed and new to host memory, stored or not.",
        "rate(loaded_blocks) / rate(needed_blocks) is the share that was spared computing, over any window.",
        is_sized=True,
    )
    arbiter_loads: int = counter("requests", "Requests for which the arbiter had all blocks of tiers loaded.")
    arbiter_cuts: int = counter(
        "requests", "Requests whose prefix the arbiter cut, because computing the rest was expected to be faster."
    )
    arbiter_cut_blocks: int = counter("blocks", "Blocks that tiers held, and that the arbiter left to be computed.")
    arbiter_give_ups: int = counter(
        "requests", "Requests that stopped waiting for a tier, since computing would have been done by then."
    )


@dataclass(frozen=True, slots=True)
class EvictionStats:
    """How old blocks of host memory were when they were evicted."""

    age_seconds: HistogramData | None = histogram(
        "seconds",
        "Time from a block's store to its eviction from host memory.",
        "Where much of it is shorter than the time between a user's turns, more memory would hit more.",
    )


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """One quantity that a policy shows of itself."""

    quantity: float = gauge("", "What a policy shows of itself, such as the length of a list, by its name.")


@dataclass(frozen=True, slots=True)
class CallStats:
    """How long one kind of call of a manager takes in the scheduler's thread."""

    duration_seconds: HistogramData | None = histogram(
        "seconds", "Time that calls of the manager took in the scheduler's thread."
    )
    worst_seconds: float = gauge("seconds", "Time that the worst call of its kind has taken so far.")


@dataclass(frozen=True, slots=True)
class HintStats:
    """The answers to actions of one type, of clients and routers; see `kvcache.hints`."""

    accepted: int = counter("actions", "Actions of hints that were executed.")
    clipped: int = counter("actions", "Actions of hints that were executed in part, up to a limit.")
    deferred: int = counter("actions", "Actions of hints that were tried again later.")
    rejected: int = counter("actions", "Actions of hints that were not executed.")
    missing: int = counter("actions", "Actions of hints whose session is unknown, or whose blocks are nowhere.")
    ignored: int = counter("actions", "Actions of hints of an unknown type or version, or with invalid fields.")


@dataclass(frozen=True, slots=True)
class EventStats:
    """The events that wait for `take_events`."""

    waiting_events: int = gauge("events", "Events that nobody has taken yet.", exported="waiting")
    dropped_events: int = counter("events", "Events dropped because nobody took them.", exported="dropped")


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters of a worker's copies in one direction."""

    jobs: int = counter("jobs", "Jobs of copies that have ended.")
    failed_jobs: int = counter("jobs", "Jobs of copies that failed.")
    moved_bytes: int = counter("bytes", "Bytes that were copied.")
    duration_seconds: HistogramData | None = histogram("seconds", "Time from the start of a job's copies to their end.")
    size_bytes: HistogramData | None = histogram("bytes", "Bytes of a job.")


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One engine's use of the pool of its node."""

    round_trips: int = counter("messages", "Messages to the owner of the node's pool that need an answer.")
    outages: int = counter("outages", "Times that the owner did not answer in time, or ended.")
    unavailable: str = flag("1 while the engine runs without the node's pool.", exported="unavailable")
    shared_hit_blocks: int = counter(
        "blocks",
        "Blocks found in the pool that this engine did not store itself.",
        "What the common pool gains: in a private pool each of them is computed again.",
    )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine of a node's pool, as the owner counts it; `process` is the pid of its scheduler, or empty."""

    process: str = ""
    held_blocks: int = gauge("blocks", "Blocks that an engine holds to load them.")
    writing_blocks: int = gauge("blocks", "Blocks that an engine is writing.")
    shared_hit_blocks: int = counter("blocks", "Blocks found by an engine that it did not store itself.")
    round_trips: int = counter("messages", "Messages of an engine that waited for the owner's answer.")
    outages: int = counter("outages", "Times that the owner did not answer an engine in time, as it said afterwards.")


@dataclass(frozen=True, slots=True)
class OwnerStats:
    """The owner of the pool of a node."""

    frames: int = counter("messages", "Messages of engines that the owner handled.")
    dropped_clients: int = counter("connections", "Connections closed: invalid messages, unread answers, no greeting.")
    refused_clients: int = counter("connections", "Engines and workers that were refused at their start.")
    ended_engines: int = counter("engines", "Engines that ended, and whose leases were returned.")


MANAGER_METRICS = metrics_of(ManagerStats)
"""What a manager counts."""
