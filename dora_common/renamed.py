"""Names that earlier versions of the packages had, and their replacements."""

_NORMS = "norms(model), and with_norms(model, values) for the calls that use them"
_PACKAGE = "the package itself, which has its public names"
_REMOVED = {
    "keep_norms": _NORMS,
    "refresh_norms": _NORMS,
    "drop_norms": _NORMS,
    "reuse": _PACKAGE,
}
INSTEAD = {
    "jax_dora": _REMOVED
    | {
        "checked_norms": _NORMS,
        "DoRANorm": _NORMS,
        "FrozenAdapter": "freeze(model), which hides the adapters from filters for parameters",
        "AdapterSet": "a dict of get_adapter(model) by name, and set_adapter(model, adapter)",
        "nnx": _PACKAGE,
        "gated": _PACKAGE,
    },
    "jax_dora.ops": {"squared_norm": "jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=0)"},
    "torch_dora": _REMOVED | {"nn": _PACKAGE, "report": "dora_common.merge_report"},
    "torch_dora.ops": {"squared_norm": "weight.float().square().sum(dim=1)"},
}


def no_attribute(module: str, name: str) -> AttributeError:
    """Returns the error for a missing name; for a removed name it says what to use instead."""
    message = f"module {module!r} has no attribute {name!r}"
    if instead := INSTEAD[module].get(name):
        message += f" any more; use {instead} (CHANGELOG.md)"
    return AttributeError(message, name=name)
