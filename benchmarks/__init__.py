"""Benchmarks of DoRA in both packages, compared with LoRA and the base: `python -m benchmarks`."""
