"""Launch parameters of attention, and why they are what they are. No device is asked and nothing is tuned at run time.

None of this is measured: it follows from the sizes of registers, shared memory and grids, and was checked by compiling.
"""

from __future__ import annotations

from dataclasses import dataclass

from .call import next_power_of_2

__all__ = ["DecodeLaunch", "PrefillLaunch", "decode_launch", "prefill_launch"]

# Of an H200. An A100 has 108, a B200 148.
_NUM_MULTIPROCESSORS = 132
_MAX_SPLITS = 32


@dataclass(frozen=True, kw_only=True)
class DecodeLaunch:
    """How decode attention is launched.

    Attributes:
        rows: Query heads of a program, padded.
        tile: Positions that are read together.
        num_splits: Shares of a sequence, a power of 2.
        least: Shares are multiples of so many positions; itself a multiple of ``tile``.
    """

    rows: int
    tile: int
    num_splits: int
    least: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class PrefillLaunch:
    """How prefill attention is launched.

    Attributes:
        rows: Queries times query heads per KV head of a program, padded.
        tile: Positions that are read together.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def decode_launch(*, num_seqs: int, num_kv_heads: int, group: int, head_dim: int, itemsize: int) -> DecodeLaunch:
    """Parameters of decode attention.

    Args:
        group: Query heads per KV head.
        head_dim: Padded to a power of 2.
        itemsize: Bytes of one number of the cache.
    """
    # Eight programs for each multiprocessor, so that the last wave, of unequal lengths, is a small part.
    wanted = -(-8 * _NUM_MULTIPROCESSORS // (num_seqs * num_kv_heads))
    return DecodeLaunch(
        rows=max(16, next_power_of_2(group)),  # the least that the matrix units take
        # 16 KiB of keys and as much of values: three or four programs fit on a multiprocessor, and have more in flight
        # than the 36 KiB that hide a microsecond of latency at 4.8 TB/s. Fewer than 16 positions are no matrix product.
        # float32 has no matrix units to hold its sums: larger tiles do not fit in registers.
        tile=max(min(16384 // (head_dim * itemsize), 128), 16) if itemsize == 2 else 16,
        num_splits=min(next_power_of_2(wanted), _MAX_SPLITS),
        # A share's sums are written and read in float32: 8 bytes a column beside 4 for each position in bfloat16, so
        # shares of 256 positions keep that under 1 % for one query head, and under 4 % for four.
        least=256,
        num_warps=4,  # 16 rows: more warps would have no rows of their own
        num_stages=3,  # the next tile's block ids are known when its keys are asked for
    )


def prefill_launch(
    *, num_tokens: int, num_seqs: int, num_kv_heads: int, group: int, head_dim: int, itemsize: int, is_plain: bool
) -> PrefillLaunch:
    """Parameters of prefill attention.

    Args:
        group: Query heads per KV head.
        head_dim: Padded to a power of 2.
        itemsize: Bytes of one number of the cache.
        is_plain: Without window and soft cap, which take registers.
    """
    least = max(16, next_power_of_2(group))
    rows = max(128 if head_dim <= 128 else 64, least)
    # As many rows as still leave two programs for every multiprocessor: each tile of KV then serves as many queries as
    # it can, and a short prompt still spreads over the device.
    while rows > least and (num_tokens * group // rows + num_seqs) * num_kv_heads < 2 * _NUM_MULTIPROCESSORS:
        rows //= 2
    if itemsize == 4:  # as in decode
        return PrefillLaunch(rows=least, tile=16, num_warps=4, num_stages=2)
    return PrefillLaunch(
        rows=rows,
        tile=max(min(16384 // (head_dim * itemsize), 64 if is_plain or rows < 128 else 32), 16),
        # 128 rows of 128 sums are 64 registers a thread over 8 warps, and the scores of a tile 32.
        num_warps=8 if rows >= 64 else 4,
        num_stages=3,
    )
