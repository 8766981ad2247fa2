"""KVEventExporter: a publisher that a configuration opens, and its counters."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.control.telemetry import Exporter
from kvcache.exporters.kv_events.publisher import (
    DEFAULT_TOPIC,
    ENCODINGS,
    HASH_FORMATS,
    KVEventPublisher,
    parse_spec_kind,
)
from kvcache.metrics import Part, counter, gauge
from kvcache.options import Options, choice_of, option, parse_count, parse_text

if TYPE_CHECKING:
    from kvcache.control.telemetry import Telemetry


def _parse_spec_kinds(name: str, value: object) -> tuple[str, ...]:
    kinds = tuple(value) if isinstance(value, list | tuple) else (value,)
    [*map(parse_spec_kind, kinds)]
    return kinds


@dataclass(frozen=True)
class KVEventOptions(Options):
    """The options of a `KVEventExporter`."""

    where: ClassVar[str] = "exporter 'kv_events'"

    endpoint: str = option(parse_text, "tcp://127.0.0.1:5557", when="routers subscribe to another address or port")
    replay_endpoint: str | None = option(parse_text, None, when="routers should be able to ask for missed messages")
    topic: str = option(parse_text, DEFAULT_TOPIC, when="routers subscribe to another topic")
    model: str = option(parse_text, "", when="routers, such as llm-d, read the model's name from the topic")
    spec_kinds: tuple[str, ...] = option(
        _parse_spec_kinds, ("full_attention",), when="the model has several KV-cache groups, or no full attention"
    )
    hash_format: str = option(choice_of(*HASH_FORMATS), "int", when="routers read whole hashes")
    encoding: str = option(choice_of(*ENCODINGS), "map", when="routers read the events of vLLM before 0.24 only")
    buffer_batches: int = option(parse_count, 10_000, when="routers may miss more batches, or start later", rare=True)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters of a publisher."""

    sent_batches: int = counter("batches", "Batches of KV events that were sent.")
    dropped_events: int = counter("events", "KV events that were dropped because too many waited.")
    rejected_requests: int = counter("requests", "Requests for replays that were refused.")
    queued_events: int = gauge("events", "KV events that wait for the publishing thread.")


class KVEventExporter(Exporter):
    """Follow an engine's manager and publish its KV events (`KVEventPublisher.follow`).

    It cannot be used if the engine takes the events itself, as vLLM's connector does when its own KV events are on.

    Parameters
    ----------
    telemetry : Telemetry
        Of a manager that keeps events. Its label ``rank`` is added to the endpoints' TCP ports, as vLLM does.
    options : mapping
        The fields of `KVEventOptions`.

    Raises
    ------
    ValueError
        An option is bad, or the manager keeps no events.
    OSError
        An endpoint cannot be bound.
    """

    needs_events = True
    options_type = KVEventOptions

    def __init__(self, telemetry: Telemetry, **options: Any) -> None:
        label = telemetry.labels.get("rank", "0")
        rank = int(label) if label.isdecimal() else 0
        for name in ("endpoint", "replay_endpoint"):
            if options.get(name) is not None:
                options[name] = _of_rank(options[name], rank)
        try:
            self.publisher = KVEventPublisher(data_parallel_rank=rank, **options)
        except ValueError as error:
            # The options were checked before: the endpoint is in use, or not this machine's.
            raise OSError(errno.EADDRNOTAVAIL, str(error)) from error
        try:
            self.publisher.follow(telemetry.manager)
        except ValueError:
            self.publisher.close()
            raise
        telemetry.sources.append(self._parts)

    @classmethod
    def unavailable_reason(cls, options: KVEventOptions) -> str:
        try:
            KVEventPublisher(**options.arguments()).close()
        except ValueError as error:
            return str(error)
        return ""

    @property
    def address(self) -> str:
        replays = self.publisher.replay_endpoint
        return self.publisher.endpoint if replays is None else f"{self.publisher.endpoint} (replays at {replays})"

    def close(self) -> None:
        self.publisher.close()

    def _parts(self) -> Iterable[Part]:
        return [Part("publisher", PublisherStats(**self.publisher.stats()))]


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: `rank` is added to its TCP port, unless that is 0."""
    match = re.fullmatch(r"(tcp://.*:)([1-9][0-9]*)", endpoint)
    return endpoint if match is None else f"{match[1]}{int(match[2]) + rank}"
