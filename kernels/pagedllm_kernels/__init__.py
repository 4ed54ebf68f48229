"""The engine's operations on tensors, one per file, each with its maths, shapes and a plain torch reference."""
