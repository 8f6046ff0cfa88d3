"""The primitive of all operators, their shards on a mesh, and the choice of a kernel."""
