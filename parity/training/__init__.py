"""`python -m parity training`: trains the same adapter in both frameworks on the same text, and
compares the runs step by step."""
