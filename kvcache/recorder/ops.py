"""Numbers of the recording format. A new operation gets a new number."""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """Kind of a record: a call of the manager, or an input or a note before it."""

    LOOKUP_ONE = 1
    LOOKUP = 2
    STATUS = 3
    TOUCH = 4
    PREPARE_LOAD = 5
    COMPLETE_LOAD = 6
    PREPARE_STORE = 7
    COMPLETE_STORE = 8
    REORDER = 9
    ON_REQUEST_FINISHED = 10
    RESET_CACHE = 11
    TAKE_EVENTS = 12
    ON_SCHEDULE_END = 13
    IS_COMING = 14
    HINT = 15
    REPORT_PREFILLS = 16
    STATUS_RUN = 17
    PREFETCH = 18
    DEMOTE = 19
    # Not calls of the manager:
    CONTEXT = 64
    POSITIONS = 65
    CLOCK = 66
    TIER_LOOKUP = 67
    TIER_SUBMIT = 68
    TIER_FINISHED = 69
    TIER_RAISED = 70
    LOST = 71
    STATS = 72
    GROUPS = 73


ONE_KEY = frozenset({Op.LOOKUP_ONE, Op.STATUS, Op.IS_COMING})
"""Calls with one key."""
NO_CONTEXT, BAD_CONTEXT, FIRST_CONTEXT = 0, 1, 2
"""In place of a request's number: none was given, or it is not a ReqContext; requests begin at the third."""
