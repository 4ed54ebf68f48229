"""Tensors: the model, its KV cache and the sampler. No policy."""
