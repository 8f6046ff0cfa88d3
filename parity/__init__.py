"""The same weights through jax_dora and torch_dora, judged against a materialised fp64 oracle."""
