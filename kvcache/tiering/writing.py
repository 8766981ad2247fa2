"""The way down: which blocks of host memory are offered to which tier, and the jobs that write them.

A block is referenced from the job's submission until the tier reports it, so it stays readable and is not evicted.
"""

from __future__ import annotations

from functools import partial
from itertools import compress, count
from typing import TYPE_CHECKING

from kvcache.block import PENDING, READY
from kvcache.specs import block_ids_of
from kvcache.tiering.controller import TierController, TierJob
from kvcache.tiering.endurance import BudgetBacklog
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS

if TYPE_CHECKING:
    from kvcache.control.pool import BlockPool
    from kvcache.request import ReqContext
    from kvcache.specs import PrepareStoreOutput

MAX_JOB_BLOCKS = 512
"""Blocks of one job at most: a tier can begin with the next one while the scheduler takes the first one in."""
_IS_READY = bytes(state == READY for state in range(256))


class Writing:
    """Offers blocks to tiers by their write policies, and writes what waits in their backlogs.

    `job_ids` numbers all jobs of a manager, those of promotions too.
    """

    def __init__(self, pool: BlockPool, controllers: list[TierController]) -> None:
        self._pool = pool
        self._controllers = controllers
        self.job_ids = count(1)
        self._limited = [(one, one.backlog) for one in controllers if isinstance(one.backlog, BudgetBacklog)]
        # A policy that may decline blocks stores all of them only if some tier receives all blocks.
        may_decline = hasattr(pool.policy, "stores_all") and pool.group_windows is None
        self._declines = may_decline and len(self._limited) == len(controllers)

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record a use of blocks, for the write policies and for the tiers."""
        self._note_use(keys, req_context)
        for controller in self._controllers:
            controller.touch(keys, req_context)

    def _note_use(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        for controller in self._controllers:
            # Blocks that are not ready are offered once they are.
            if due := controller.backlog.use(keys, req_context):
                controller.backlog.offer(reversed(self._ready(due)))

    def reserve(self, keys: list[bytes], req_context: ReqContext | None) -> PrepareStoreOutput | None:
        """Make room for blocks in host memory, and choose which tiers with a budget of writes receive them."""
        # A call without keys precedes the one that stores the request's blocks, whose number the choice needs.
        limited = self._limited if keys else []
        chosen = [(*part, self._chosen(*part, keys, req_context)) for part in limited]
        # Where no tier receives these blocks, the policy of host memory may decline them.
        is_written = not chosen or any(backlog.writes(req_context) for _, backlog, _ in chosen)
        output = self._pool.reserve(keys, req_context, may_decline=self._declines and not is_written)
        if output is not None:
            self.note_evicted(output.evicted_keys)
            self._note_use(keys, req_context)
        for _, backlog, run in chosen:
            self._give(backlog, run)
        return output

    def _chosen(
        self, controller: TierController, backlog: BudgetBacklog, keys: list[bytes], req_context: ReqContext | None
    ) -> list[bytes]:
        find = partial(controller.lookup, now_s=self._pool.clock())
        return backlog.choose(keys, req_context, find, controller.num_waiting)

    def _give(self, backlog: BudgetBacklog, run: list[bytes]) -> None:
        states = self._pool.states(run)
        backlog.offer(reversed(ready_keys(run, states)))
        backlog.due.update(key for key, state in zip(run, states, strict=True) if state == PENDING)

    def hurry(self, keys: list[bytes]) -> bool:
        """Have the next step write those ready blocks that tiers would get later; return whether all had room."""
        rooms = [(controller.backlog, controller.room(False)) for controller in self._controllers]
        ready = self._ready(keys)
        return not sum(backlog.hurry(ready, max(0, room - len(backlog))) for backlog, room in rooms)

    def offer(self, keys: list[bytes], source: TierController | None) -> None:
        """Offer blocks that became ready to the tiers, but for the one that they came from."""
        for controller in self._controllers:
            if controller is source:
                controller.backlog.skip(keys)
            else:
                controller.backlog.add(keys)

    def abort(self, keys: list[bytes]) -> None:
        """Record blocks that failed to become ready."""
        for controller in self._controllers:
            controller.backlog.skip(keys)

    def note_evicted(self, keys: list[bytes]) -> None:
        """Record blocks that left host memory."""
        if keys:
            for controller in self._controllers:
                controller.backlog.remove(keys)

    def send(self, now_s: float) -> None:
        """Write what waits, a bounded number of blocks for all tiers together."""
        num_left = MAX_STEP_BLOCKS
        for controller in self._controllers:
            backlog = controller.backlog
            if backlog.is_idle:
                continue
            if not controller.may_send(False, now_s):
                backlog.drop(is_paused=True)
                continue
            backlog.offer_due(controller.room(False))
            # A tier that is being tried again gets one job only.
            while (room := min(controller.room(False), num_left, MAX_JOB_BLOCKS)) > 0 and controller.may_send(
                False, now_s
            ):
                is_again = not backlog
                keys = backlog.take_missed(controller.room_for_missed(room)) if is_again else backlog.take(room)
                num_left -= len(keys)
                if not (keys and self._store(controller, keys, is_again, now_s)):
                    break

    def end(self, job: TierJob, missed: list[bytes]) -> None:
        """Release the blocks of a job; those that a failing tier missed are offered again once it works."""
        self._pool.unpin(job.keys)
        job.controller.backlog.miss(missed)

    def end_request(self, req_context: ReqContext) -> None:
        """Record the end of a request."""
        for controller, backlog in self._limited:
            self._give(backlog, self._chosen(controller, backlog, [], req_context))
        for controller in self._controllers:
            controller.end_request(req_context)

    def _store(self, controller: TierController, keys: list[bytes], is_again: bool, now_s: float) -> bool:
        """Send one job; return whether the tier may get another one."""
        backlog = controller.backlog
        ready = self._ready(keys)
        backlog.note_unwritten(len(keys) - len(ready), is_again)
        if not ready:
            return True
        # The tier reads the blocks from the moment it has the job, so the reference comes first.
        block_ids = block_ids_of(self._pool.pin(ready, is_move=True)).tolist()
        deadline_s = now_s + controller.config.deadline_s
        job = TierJob(next(self.job_ids), controller, False, ready, block_ids, deadline_s, is_again=is_again)
        if controller.send(job, now_s):
            return True
        self._pool.unpin(ready)
        backlog.note_unwritten(len(ready), is_again)
        # A tier that refuses is full or closed, not failing: it refuses the rest as well.
        backlog.drop(is_paused=False)
        return False

    def _ready(self, keys: list[bytes]) -> list[bytes]:
        return ready_keys(keys, self._pool.states(keys))


def ready_keys(keys: list[bytes], states: bytes) -> list[bytes]:
    """Return those of the keys whose state is READY, without a loop in Python: there may be thousands."""
    return list(compress(keys, states.translate(_IS_READY)))
