"""Lets Triton's interpreter look things up once: else that is half of the time of its kernels."""

import functools
import importlib.util
import inspect
from typing import Any


def look_up_once() -> None:
    """Replaces two functions of the interpreter, where there is Triton.

    A launch replaces the functions of Triton's language by interpreted ones until it ends. Every
    call of another function within a kernel searches the language for them again, and finds none.
    And every operation makes a table of all dtypes to look up one.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language import core
    from triton.runtime import interpreter

    replace, dtype_of = interpreter._patch_builtin, interpreter._get_np_dtype
    found: dict[str, Any] = {}

    @functools.cache
    def one_of(language: Any) -> str | None:
        members = inspect.getmembers(language)
        return next((name for name, member in members if core.is_builtin(member)), None)

    def replace_once(language: Any, *of_a_launch: Any) -> None:
        name = one_of(language)
        if name and core.is_builtin(getattr(language, name)):
            replace(language, *of_a_launch)

    def known_dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = dtype_of(kind)
        return found[name]

    interpreter._patch_builtin, interpreter._get_np_dtype = replace_once, known_dtype_of
