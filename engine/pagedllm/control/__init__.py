"""Policy: which sequence computes how many tokens next, and which KV blocks it may write. Pure Python, no tensors."""
