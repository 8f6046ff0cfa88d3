"""Setup of all tests: the platform and the profile of hypothesis."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from tests.draws import draw_with_numpy
from tests.interpretation import look_up_once

# Enough host devices for a mesh of 2 × 4.
_CPU_DEVICES = 8
# Linux allows a process 65,530 memory maps by default. A compiled program has about ten.
_MAPS = Path("/proc/self/maps")
_MOST_MAPS = 40_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile for CPUs with all optimizations, as users do",
    )
    parser.addoption(
        "--keep-programs",
        action="store_true",
        help="cache compiled programs in .pytest_cache: later runs take half as long",
    )
    parser.addoption(
        "--soak-runs",
        type=int,
        default=200,
        help="runs of the fine-tuning command under faults (%(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tracing and interpreting make many objects, few of them in circles. Collecting as often as
    # Python does by default would take a tenth of the time of the tests.
    gc.set_threshold(100_000, 50, 100)
    # Workers share the cores, so torch's threads of several workers would wait for one another.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Set before any test module is imported, because Triton and JAX read these settings once.
    # `-m gpu` and `-m gpus` run the kernels natively; all other tests interpret them on the CPU.
    if config.getoption("markexpr") not in ("gpu", "gpus"):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that tests start
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
        # Programs are small, so compiling them in several threads does not pay.
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
        )
        # LLVM's optimizations would take half of the time.
        if not config.getoption("optimized"):
            jax.config.update("jax_disable_most_optimizations", True)
        draw_with_numpy()
        look_up_once()

    # A cached file is named by a hash of the program, JAX's version and all flags. JAX does not
    # cache programs with callbacks, such as interpreted kernels.
    if config.getoption("keep_programs"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only Mosaic kernels can pass, under `-m gpu` on other cards than Hopper's."""
    if config.getoption("markexpr") != "gpu":
        return
    from jax_dora.ops.dispatch.choose import target

    refused = {name for name in ("mosaic", "triton") if target().refuses(name)}
    left_out = [item for item in items if refused & _kernels_of(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _kernels_of(item: pytest.Item) -> set[str]:
    """Returns the implementation of JAX that a test needs, as its name or its parameters say."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    named = {one for one in values if isinstance(one, str)} & {"mosaic", "triton"}
    of_hopper = {"on_mosaic", "on_hopper", "hopper"} & {*item.fixturenames}
    if not named and (of_hopper or "mosaic" in item.nodeid):
        named = {"mosaic"}
    return named if "torch_dora" not in item.nodeid else set()


def pytest_collection_finish() -> None:
    """Excludes imported modules from garbage collection, which would scan them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets go of compiled programs between files, once a process has very many."""
    if nextitem and nextitem.path != item.path and _MAPS.exists():
        if _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
            jax.clear_caches()
            gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests recorded with `record_property("printed", …)`, also in other processes."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "printed":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
    if terminalreporter.config.getoption("markexpr") == "gpu":
        from parity.environment import environment

        terminalreporter.write_line(f"The card: {environment('cuda')}")
        terminalreporter.write_line(
            "On a card that docs/measured/which-gpu.md calls not measured, please send this line, "
            "the ones below and those of failed tests in an issue."
        )


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles with all optimizations, for tests that read the compiled program."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
