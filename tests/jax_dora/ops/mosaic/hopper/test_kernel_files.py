"""A second process with a compilation cache lowers no kernel, and XLA compiles nothing anew."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_dora.ops.identity import digest
from jax_dora.ops.mosaic.hopper import kernel_files, launch

# Prints how many kernels were traced and lowered for one device, their program, and how often JAX
# found a program for two devices in its cache.
PROCESS = """
import collections, hashlib, json
import jax
import jax.numpy as jnp
from jax_dora import ops
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.hopper import launch

def loss(*operands):
    return ops.dora_linear(*operands, 0.7).astype(jnp.float32).sum()

def avals(sharding=None):
    shapes = (2048, 1024), (1024, 1024), (1024, 16), (16, 1024), (1024,)
    rows, *others = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding), *others

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
gradient = jax.grad(loss, (0, 2, 3, 4))
with jax.set_mesh(mesh):
    jax.jit(gradient).lower(*avals(jax.NamedSharding(mesh, jax.P("data")))).compile()
choose.target = lambda: choose.Target("gpu", "9.0")
traces, trace = [], launch._Kernel.traced
launch._Kernel.traced = lambda *arguments: traces.append(arguments) or trace(*arguments)
traced = jax.jit(gradient).trace(*avals())
program = traced.lower(lowering_platforms=("cuda",)).as_text()
row = {"kernels": launch._code.cache_info().misses, "traced": len(traces)}
row |= {"hits": events["/jax/compilation_cache/cache_hits"]}
print(json.dumps(row | {"program": hashlib.sha256(program.encode()).hexdigest()}))
"""


def in_process(folder):
    """Returns what a new process with a compilation cache prints."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.ci
def test_a_second_process_lowers_and_compiles_nothing(tmp_path):
    first, second = in_process(tmp_path), in_process(tmp_path)
    assert first["traced"] == first["kernels"] == second["kernels"] >= 3
    assert second["traced"] == 0
    assert second["program"] == first["program"]
    assert (first["hits"], second["hits"]) == (0, 1)


@pytest.mark.parametrize("alone", [True, False])
def test_the_program_of_a_single_kernel_is_not_stored(tmp_path, alone):
    """XLA's own operation stands for the kernel, as only a GPU compiles one."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.clear_caches()
        program = jax.jit(jnp.sin).lower(1.0)
        if alone:
            launch._compile_alone(lambda: program)
        else:
            program.compile()
        assert any(tmp_path.glob("jit_sin*")) is not alone
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(("devices", "stored", "compiles"), [(1, 0, 1), (1, 1, 0), (2, 1, 1)])
def test_a_stored_kernel_is_compiled_ahead_on_several_devices(
    monkeypatch, devices, stored, compiles
):
    """On one device JAX finds the program, with the code of its kernels."""
    started = []
    monkeypatch.setattr(launch, "_compile_alone", started.append)
    monkeypatch.setattr(launch.threading, "Thread", Now)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(launch, "_program", lambda *_: KERNEL if stored else None)
    monkeypatch.setattr(launch, "_compiled", set())
    kernel = launch._Kernel(module_function, (("sm_count", 132),), None)
    for _ in range(2):
        launch._compile_ahead(kernel, ())
    assert len(started) == compiles


class Now:
    """A thread that runs at once."""

    def __init__(self, target, name):
        self.start = target


KERNEL = kernel_files.Stored(
    (jax.ShapeDtypeStruct((4, 8), jnp.bfloat16), None, [jax.ShapeDtypeStruct((), jnp.int8)]),
    b"a module\n",
)


def test_a_kernel_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "folder" / "kernel"
    assert kernel_files.read(file) is None
    kernel_files.write(file, KERNEL)
    assert kernel_files.read(file) == KERNEL
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b""])
def test_a_damaged_file_is_replaced(tmp_path, damage):
    file = tmp_path / "kernel"
    kernel_files.write(file, KERNEL)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match="kernel is damaged"):
        assert kernel_files.read(file) is None
    kernel_files.write(file, KERNEL)
    assert kernel_files.read(file) == KERNEL


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot store a kernel"):
        kernel_files.write(tmp_path / "file" / "kernel", KERNEL)


def module_function():
    """Has a name that other processes know."""


def test_a_hash_depends_on_values_and_configuration_only():
    assert digest(module_function, (1, 2.5)) == digest(module_function, (1, 2.5))
    assert digest(module_function, (1, 2.5)) != digest(module_function, (1, 2.25))
    with jax.default_matmul_precision("highest"):
        highest = digest(module_function)
    assert highest != digest(module_function)


@pytest.mark.parametrize("unnamed", [lambda: None, object(), (object(),)])
def test_what_only_one_process_knows_has_no_hash(unnamed):
    assert digest(unnamed) is None
