"""fp8: floating-point KV caches with eight bits a value and one scale for each group of values. Lossy.

Half the bytes of bfloat16. Values of a group are divided by a scale that brings the largest one to the largest number
of e4m3, and rounded: each is off by at most a sixteenth of itself, or where it is tiny by 1/450,000 of the group's
largest. A model's answers may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcache.options import Options, choice_of, option, parse_count
from kvcache.tiers.base.codec import CannotEncodeError, Codec

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MAX_E4M3 = 448.0
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Fp8Options(Options):
    """The options of an `Fp8Codec`."""

    where: ClassVar[str] = "codec fp8"

    dtype: str = option(choice_of(*_DTYPES, *_SHORT), when="always: the dtype of the KV cache")
    group: int = option(parse_count, 128, when="fewer values must share a scale, for accuracy", rare=True)


class Fp8Codec(Codec):
    """Round values to e4m3, with a float32 scale per group.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block; a whole number of groups. 0: not known yet.
    dtype : str
        Of the KV cache: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    group : int
        Values that share a scale.
    """

    options_type = Fp8Options
    is_lossy = True

    def __init__(self, block_bytes: int, dtype: str, group: int = Fp8Options.group) -> None:
        self._dtype = _DTYPES[_SHORT.get(dtype, dtype)]
        group_bytes = group * self._dtype.itemsize
        if block_bytes % group_bytes:
            raise ValueError(
                f"fp8 needs blocks of whole groups of {group} {dtype} values, {group_bytes} bytes, "
                f"got {block_bytes} bytes"
            )
        self._group = group
        self._num_groups = block_bytes // group_bytes

    @property
    def max_bytes(self) -> int:
        return self._num_groups * (_SCALE_BYTES + self._group)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"codec": "fp8", "dtype": str(self._dtype), "group": self._group}

    def encode(self, block: memoryview, target: memoryview) -> int:
        # torch warns about views of read-only memory; `block` is not written to.
        values = torch.frombuffer(block, dtype=self._dtype).view(self._num_groups, self._group).float()
        scales = values.abs().amax(dim=1, keepdim=True) / _MAX_E4M3
        if not bool(torch.isfinite(scales).all()):
            raise CannotEncodeError("the block holds values that are infinite or no numbers")
        scales[scales == 0] = 1.0
        # The quotient of the largest value may round up beyond the largest e4m3 number, which would become NaN.
        codes = (values / scales).clamp_(-_MAX_E4M3, _MAX_E4M3).to(torch.float8_e4m3fn)
        out = torch.frombuffer(target, dtype=torch.uint8)
        split = self._num_groups * _SCALE_BYTES
        out[:split] = scales.view(-1).view(torch.uint8)
        out[split : self.max_bytes] = codes.view(torch.uint8).view(-1)
        return self.max_bytes

    def decode(self, code: memoryview, block: memoryview) -> None:
        if len(code) != self.max_bytes:
            raise ValueError(f"a code of {self.max_bytes} bytes is expected, got {len(code)}")
        source = torch.frombuffer(code, dtype=torch.uint8)
        split = self._num_groups * _SCALE_BYTES
        scales = source[:split].view(torch.float32).view(self._num_groups, 1)
        codes = source[split:].view(torch.float8_e4m3fn).view(self._num_groups, self._group)
        torch.frombuffer(block, dtype=self._dtype).view(self._num_groups, self._group).copy_(codes.float() * scales)
