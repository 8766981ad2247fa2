"""The numbers of a recording's format: operations, kinds of answers and of tier calls; docs/howto/record.md has them.

Numbers are for ever: a new operation takes the next free one.
"""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """What a record is: a call of the manager, or something that a call depends on and that comes before it."""

    LOOKUP_ONE = 1
    LOOKUP = 2
    STATUS = 3
    TOUCH = 4
    PREPARE_LOAD = 5
    COMPLETE_LOAD = 6
    PREPARE_STORE = 7
    COMPLETE_STORE = 8
    REORDER = 9
    REQUEST_FINISHED = 10
    RESET = 11
    TAKE_EVENTS = 12
    SCHEDULE_END = 13
    IS_COMING = 14
    HINT = 15
    REPORT_PREFILLS = 16
    STATUS_RUN = 17
    # Not calls:
    CONTEXT = 64
    POSITIONS = 65
    CLOCK = 66
    TIER_LOOKUP = 67
    TIER_SUBMIT = 68
    TIER_FINISHED = 69
    TIER_RAISED = 70
    LOST = 71
    STATS = 72
    TIER_TIMES = 73
    GROUPS = 74
    REFUSED = 75


class Answer(IntEnum):
    """The kind of a call's answer."""

    NONE = 0
    FALSE = 1
    TRUE = 2
    INT = 3
    BLOCKS = 4
    OUTPUT = 5
    ERROR = 6
    EVENTS = 7
    OTHER = 8


class TierCall(IntEnum):
    """Which method of a tier raised."""

    LOOKUP = 0
    SUBMIT_STORE = 1
    SUBMIT_LOAD = 2
    GET_FINISHED = 3
    TOUCH = 4
    REQUEST_FINISHED = 5
    RESET = 6
    CANCEL = 7


EMPTY_KEY, NO_KEY = 0, 1
"""In place of a key's hash: it was empty, or no bytes."""
NO_CONTEXT, BAD_CONTEXT, FIRST_CONTEXT = 0, 1, 2
"""In place of a request's number: there was none, or it was no ReqContext; numbers begin at the third."""
