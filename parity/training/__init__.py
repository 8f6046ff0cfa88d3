"""Level `training`: the same adapter trained by both frameworks on the same text, step by step."""
