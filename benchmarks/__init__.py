"""How fast and how large: DoRA beside LoRA and the plain base, in both frameworks, by one clock."""
