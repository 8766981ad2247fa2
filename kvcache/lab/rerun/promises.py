"""The invariants of every manager of one medium, whatever its policy: they find faults without a second manager."""

from __future__ import annotations

from typing import Any

from kvcache.lab.rerun.recorded import Runner, is_expected_error
from kvcache.lab.traces.recording import Answer, Call
from kvcache.recorder.format import Raised, Stored
from kvcache.recorder.ops import Op

_CHECK_BLOCKS = 4096
_CHECK_EVERY = 997
_STATES = ("absent", "being written", "ready")


class Promises:
    """Checks the answers of a manager."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._is_tiered = bool(runner.tiers)
        self._num_blocks: int = runner.manager.stats().num_blocks
        self._check = getattr(runner.manager.policy, "check", None)
        self._num_calls = 0
        # Key to block id and references; -1 references: being written.
        self._blocks: dict[bytes, list[int]] = {}

    def __call__(self, call: Call, answer: Answer) -> str:
        """Return a description of the promise that a call's answer breaks, or ""."""
        self._num_calls += 1
        if isinstance(answer, Raised) and not is_expected_error(answer.name):
            return f"{answer.name} was raised"
        if answer == Raised("BlockStateError") and call.op is Op.PREPARE_STORE:
            return "the policy chose blocks to evict that must stay"
        fault = "" if self._is_tiered else self._follow(call, answer)
        if (
            not fault
            and self._check is not None
            and (self._num_blocks <= _CHECK_BLOCKS or self._num_calls % _CHECK_EVERY == 0)
        ):
            try:
                self._check()
            except Exception as error:
                fault = f"the policy's check fails: {type(error).__name__}: {error}"
        return fault

    def _follow(self, call: Call, answer: Answer) -> str:
        blocks, keys = self._blocks, call.keys
        if isinstance(answer, Raised):
            return ""
        # Each case compares before it changes the state, so that a wrong answer does not become the expectation.
        match call.op:
            case Op.RESET_CACHE:
                blocks.clear()
            case Op.LOOKUP:
                ready = 0
                while ready < len(keys) and blocks.get(keys[ready], (0, -1))[1] >= 0:
                    ready += 1
                if answer != ready:
                    return f"{ready} leading blocks are ready, lookup found {answer}"
            case Op.LOOKUP_ONE | Op.STATUS:
                state = 0 if keys not in blocks else 1 if blocks[keys][1] < 0 else 2
                if answer != (state if call.op is Op.STATUS else state == 2):
                    return f"the block is {_STATES[state]}, the answer was {answer}"
            case Op.PREPARE_LOAD:
                if any(blocks.get(key, (0, -1))[1] < 0 for key in keys):
                    return "prepare_load gave a reference on a block that is not ready"
                if answer != [blocks[key][0] for key in keys]:
                    return "prepare_load returned other block ids than prepare_store"
                for key in keys:
                    blocks[key][1] += 1
            case Op.COMPLETE_LOAD:
                for key in keys:
                    if blocks.get(key, (0, 0))[1] < 1:
                        return "complete_load took a reference back that nobody had"
                    blocks[key][1] -= 1
            case Op.COMPLETE_STORE:
                for key in keys:
                    if key in blocks and blocks[key][1] < 0:
                        if call.flag:
                            del blocks[key]
                        else:
                            blocks[key][1] = 0
            case Op.PREPARE_STORE:
                return self._stored(set(keys), answer)
            case _:
                pass
        return ""

    def _stored(self, named: set[Any], answer: Answer) -> str:
        output = self._runner.last_output
        if output is None or not isinstance(answer, Stored):
            return ""
        blocks = self._blocks
        num_evicted, ids = answer.num_evicted, answer.block_ids
        stored: Any = answer.keys
        num_needed = max(0, len(stored) + len(blocks) - self._num_blocks)
        if num_evicted != num_needed:
            return f"{num_evicted} blocks were evicted where {num_needed} had to be"
        # Victims leave first: a new block may take the slot of one.
        for key in output.evicted_keys:
            state = blocks.pop(key, None)
            if state is None:
                return "a block was evicted that was not there"
            if state[1] != 0:
                return "a block was evicted that was referenced or being written"
            if key in named:
                return "a block was evicted that the call itself named"
        used = {block_id for block_id, _ in blocks.values()}
        for key, block_id in zip(stored, ids, strict=True):
            if key in blocks or key not in named:
                return "a block is to be stored that is there, or was not named"
            if block_id in used or not 0 <= block_id < self._num_blocks:
                return f"block id {block_id} is in use, or no slot of the pool"
            used.add(block_id)
            blocks[key] = [block_id, -1]
        return ""
