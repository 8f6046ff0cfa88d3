"""What every test runs under: the platform, strictness, and hypothesis' profile."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from tests.draws import draw_with_numpy

# Enough host devices for a mesh of two axes, one of them longer than two.
_CPU_DEVICES = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile for CPUs with all optimizations, as users do",
    )
    parser.addoption(
        "--keep-programs",
        action="store_true",
        help="keep what is compiled in .pytest_cache: a run after the first takes half as long",
    )
    parser.addoption(
        "--soak-runs",
        type=int,
        default=200,
        help="runs of the fine-tuning command under faults (%(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers share the cores: torch's threads, as many in each, would wait for one another.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Both are read when first used, so they are set before a test module is imported. `-m gpu` and
    # `-m gpus` run the kernels natively; everything else runs them in their interpreters on CPU.
    if config.getoption("markexpr") not in ("gpu", "gpus"):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
        # A program this small is not worth the threads that compile it in pieces.
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
        )
        # Half of the time would be LLVM's.
        if not config.getoption("optimized"):
            jax.config.update("jax_disable_most_optimizations", True)
        draw_with_numpy()

    # A file's name is a hash of the program, JAX's version and all flags. JAX keeps none that calls
    # back, such as an interpreted kernel.
    if config.getoption("keep_programs"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests have recorded as "printed", in other processes too."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "printed":
                terminalreporter.write_line(f"{report.nodeid}: {value}")


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles as users do, for a test that reads what is compiled."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def strict_jax() -> Iterator[None]:
    """No silent promotion of dtypes or ranks in anything a test traces."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
