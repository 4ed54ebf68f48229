"""Whether a preempted sequence's KV is copied to the host or computed again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SwapChoice"]

# Weight of the newest measurement: the rate depends on what else a step computes, so it is smoothed.
_NEWEST = 0.2
_MIN_TOKENS = 32


@dataclass
class SwapChoice:
    """Compares the time of two copies with the time of a prefill, both at rates measured on this machine.

    Args:
        mode: ``auto`` compares; ``swap`` and ``recompute`` are forced.
        bytes_per_block: Over all layers.
        copy_bytes_per_s: Measured when the engine starts; None where there is no host tier.
        prefill_tokens_per_s: Measured while it runs; None until a step has computed some prompt.
    """

    mode: str = "auto"
    bytes_per_block: int = 0
    copy_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to swap a sequence that holds so many blocks with the KV of so many tokens."""
        if self.copy_bytes_per_s is None or self.mode == "recompute":
            return False
        if self.mode == "swap" or self.prefill_tokens_per_s is None:
            return True
        swap_s = 2 * num_blocks * self.bytes_per_block / self.copy_bytes_per_s
        return swap_s <= num_tokens / self.prefill_tokens_per_s

    def observe_step(self, num_prefill_tokens: int, num_tokens: int, duration_s: float) -> None:
        """Learn from a step; only those that mostly computed prompts tell the rate."""
        if num_prefill_tokens < max(_MIN_TOKENS, num_tokens // 2) or duration_s <= 0:
            return
        rate = num_tokens / duration_s
        known = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if known is None else known + _NEWEST * (rate - known)
