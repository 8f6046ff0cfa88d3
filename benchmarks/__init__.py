"""Measures speed and memory: DoRA beside LoRA and the plain base, in both frameworks, by one
clock."""
