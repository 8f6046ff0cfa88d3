"""Weights that a module's own code reads, adapted in the products that read them.

A module keeps its class and its code. While one of its methods runs, the adapted weight is followed
through casts, transposes, reshapes and indexing to the products that read it, which become adapted
ones; whatever else reads it is given the effective weight W'.
"""
