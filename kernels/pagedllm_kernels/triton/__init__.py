"""The operations on GPUs, in Triton. Nothing here is imported before the first use of a GPU."""
