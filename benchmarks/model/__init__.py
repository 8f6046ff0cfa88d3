"""The decoder of Qwen3-8B's kind that the levels `scale` and `compile` measure, and its sizes."""
