import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops import compose, device, dispatch, dora_linear, factored_norm, tuning
from jax_dora.ops.device import Target
from jax_dora.ops.dispatch import Option, choose
from jax_dora.ops.mosaic import compose as mosaic_compose
from jax_dora.ops.mosaic import compose_backward, expand_compose, projection, rowwise, strips
from jax_dora.ops.mosaic import norm as mosaic_norm


def test_an_unnamed_call_takes_the_first_that_is_able_and_not_slower():
    xla = Option("xla")
    assert choose("op", None, (Option("mosaic"), xla)) == "mosaic"
    assert choose("op", None, (Option("mosaic", slower="small"), xla)) == "xla"
    assert choose("op", None, (Option("mosaic", refusal="odd"), xla)) == "xla"


def test_a_named_implementation_runs_or_raises():
    xla = Option("xla")
    assert choose("op", "mosaic", (Option("mosaic", slower="small"), xla)) == "mosaic"
    with pytest.raises(NotImplementedError, match=r"op: .*'mosaic' cannot .*: odd"):
        choose("op", "mosaic", (Option("mosaic", refusal="odd"), xla))
    with pytest.raises(ValueError, match="implementation is 'eager'; expected None"):
        choose("op", "eager", (xla,))


@pytest.mark.parametrize(
    ("target", "refused", "slower"),
    [
        (device.Target("gpu", "9.0", "NVIDIA H200"), False, False),
        (device.Target("gpu", "8.0", "NVIDIA A100"), True, False),
        (device.Target("gpu", "9.0", "NVIDIA H200", partitioned=True), False, True),
        (device.Target("cpu"), False, True),
        (device.Target("cpu", interpreted=True), False, True),
    ],
)
def test_what_the_target_alone_decides(target, refused, slower):
    option = dispatch.runs_mosaic(target)
    assert (bool(option.refusal), bool(option.slower)) == (refused, slower)


@pytest.mark.parametrize(
    ("rows", "out", "dtype", "reason"),
    [
        (4, 16, jnp.float32, None),
        (4, 12, jnp.float32, "out = 12 is not a multiple of 8"),
        (0, 16, jnp.float32, "no rows"),
        (4, 16, jnp.float64, "dtype float64"),
    ],
)
def test_the_kernels_say_why_they_refuse(rows, out, dtype, reason):
    got = rowwise.refuses(rows, out, dtype)
    assert got is None if reason is None else reason in got


def test_a_named_mosaic_refuses_what_the_kernel_cannot_take():
    x = jnp.ones((3, 12))
    with (
        plgpu.force_gpu_interpret_mode(),
        pytest.raises(NotImplementedError, match="out = 12 is not a multiple of 8"),
    ):
        compose(x, x, jnp.ones(12), 1.0, implementation="mosaic")


def test_mosaic_is_refused_under_x64_and_another_takes_the_call(monkeypatch):
    hopper = Target("gpu", "9.0", "NVIDIA H200")
    assert dispatch.runs_mosaic(hopper).refusal is None
    with jax.enable_x64(True):
        assert device.target().x64
        wide = dataclasses.replace(hopper, x64=True)
        monkeypatch.setattr(device, "target", lambda: wide)
        x, g = jnp.ones((8, 16), jnp.bfloat16), jnp.ones(16, jnp.float32)
        assert compose(x, x, g, 1.0).dtype == jnp.bfloat16
        with pytest.raises(NotImplementedError, match="jax_enable_x64 is set"):
            compose(x, x, g, 1.0, implementation="mosaic")


def test_unnamed_calls_of_any_shape_run():
    x = jnp.ones((3, 12))
    assert compose(x, x, jnp.ones(12), 1.0).shape == x.shape


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))],
    ids=["eager", "jit", "vmap"],
)
def test_mosaic_on_a_cpu_is_refused_with_its_reason(transform):
    x = jnp.ones((2, 3, 16))
    with pytest.raises(NotImplementedError, match="runs on a Hopper"):
        transform(lambda x: compose(x, x, jnp.ones(16), 1.0, implementation="mosaic"))(x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "out"), [(1, 512), (4097, 8192), (8192, 28672), (512, 2056), (33, 8)]
)
def test_mosaic_lowers_for_cuda_without_a_gpu(rows, out, dtype):
    x = jax.ShapeDtypeStruct((rows, out), dtype)
    g = jax.ShapeDtypeStruct((out,), jnp.float32)

    def forward_and_backward(base, lora, g, dy):
        y, vjp = jax.vjp(lambda *a: compose(*a, 0.7, implementation="mosaic"), base, lora, g)
        return y, vjp(dy)

    traced = jax.jit(forward_and_backward).trace(x, x, g, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dora_compose_backward" in text
    assert text.count("custom_call @mosaic_gpu") == 2


TABLE: dict[str, Any] = {
    "crossovers": {
        "compose": None,
        "compose_backward": {"min": {"rows": 256}, "max": {"out": 1024}},
        "dropped_product": {"max": {"rank": 64}},
        "dropped_product_back": {},
        "expand_compose": {},
        "norm": {"min": {"in": 1024}},
        "project": {},
        "project_back": {},
        "swiglu_backward": {},
    },
    "configs": {
        "norm": [
            {"max": {"rank": 16}, "config": {"tile_cols": 64, "stages": 2, "slots": 1}},
            {"max": {"rank": 64}, "config": {"stages": 64}},
            {"config": {"stages": 3}},
        ],
        "compose": [{"config": {"stages": 3}}],
        "compose_backward": [{"config": {"stages": 2}}],
        "dropped_product": [{"config": {"stages": 3}}],
        "dropped_product_back": [{"config": {"parts": 2}}],
        "expand_compose": [{"config": {"tile_cols": 64}}],
        "project": [{"config": {"band": 2}}],
        "project_back": [{"config": {"band": 3, "band_in_cols": True}}],
        "swiglu_backward": [{"config": {"stages": 2, "tile_bytes": 4096}}],
    },
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuning.Table:
    """`TABLE`, in the place of every device's."""
    path = tmp_path / "card.json"
    path.write_text(json.dumps(TABLE))
    read = tuning.read(path)
    monkeypatch.setattr(tuning, "load", lambda kind: read)
    return read


@pytest.mark.parametrize(
    ("kernel", "sizes", "reason"),
    [
        ("compose", {"rows": 4096, "out": 512}, "as fast as compose at every size"),
        ("compose_backward", {"rows": 256, "out": 1024}, None),
        ("compose_backward", {"rows": 255, "out": 1024}, "rows = 255 is below 256"),
        ("compose_backward", {"rows": 256, "out": 1025}, "out = 1025 is above 1024"),
        ("project", {"rows": 1, "out": 1}, None),
    ],
)
def test_the_table_says_where_xla_is_the_better_choice(table, kernel, sizes, reason):
    got = tuning.slower("card", kernel, sizes)
    assert got is None if reason is None else reason in got


def test_the_first_config_whose_bounds_hold_is_taken_if_it_fits(table):
    def chosen(rank: int, fits: Callable[[Any], bool] | None = None):
        sizes = {"in": 64, "rank": rank, "out": 64}
        dtypes = jnp.bfloat16, jnp.bfloat16
        return tuning.config(
            "card", "norm", sizes, fits or (lambda c: mosaic_norm.fits(c, rank, *dtypes))
        )

    assert chosen(16) == strips.StripConfig(tile_cols=64, stages=2, slots=1)
    assert chosen(17) is None  # 64 stages have no room, and no later entry steps in.
    assert chosen(17, fits=lambda c: True) == strips.StripConfig(stages=64)
    assert chosen(65) == strips.StripConfig(stages=3)


def test_without_an_entry_the_kernels_choose_themselves():
    sizes = {"in": 8192, "rank": 384, "out": 8192}
    empty = tuning.Table({}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "load", lambda kind: empty)
        assert tuning.config("card", "norm", sizes, lambda config: True) is None


@pytest.mark.parametrize(
    ("module", "name", "n_in", "expected"),
    [
        (mosaic_norm, "norm", 64, strips.StripConfig(tile_cols=64, stages=2, slots=1)),
        (projection, "project", 64, projection.ProjectionConfig(band=2)),
        (projection, "project_back", 64, projection.ProjectionConfig(band=3, band_in_cols=True)),
        (expand_compose, "expand_compose", 72, strips.StripConfig(tile_cols=64)),
        (compose_backward, "compose_backward", 72, rowwise.RowwiseConfig(stages=2)),
        (mosaic_compose, "compose", 72, rowwise.RowwiseConfig(stages=3)),
    ],
)
def test_every_kernel_is_launched_with_its_measured_config(
    table, monkeypatch, module, name, n_in, expected
):
    kernel, used = getattr(module, name), []

    def launched(*arguments, **options):
        used.append(options["config"])
        return kernel(*arguments, **options)

    monkeypatch.setattr(module, name, launched)
    bf16 = jnp.bfloat16
    x, w = jnp.ones((128, n_in), bf16), jnp.ones((n_in, 128), bf16)
    a, b, m = jnp.ones((n_in, 16), bf16), jnp.ones((16, 128), bf16), jnp.ones(128)

    def run(x, w, a, b, m):
        norm = factored_norm(w, a, b, 0.5, implementation="mosaic")
        y = dora_linear(x, w, a, b, m, 0.5, norm=norm, implementation="mosaic")
        return y + compose(y, y, m, 0.5, implementation="mosaic")

    with plgpu.force_gpu_interpret_mode():
        jax.eval_shape(
            jax.grad(lambda *o: run(*o).astype(jnp.float32).sum(), (0, 4)), x, w, a, b, m
        )
    assert used
    assert set(used) == {expected}


def _damaged(*path_and_value: Any) -> dict[str, Any]:
    *path, last, value = path_and_value
    table = copy.deepcopy(TABLE)
    inner: Any = table
    for key in path:
        inner = inner[key]
    inner[last] = value
    return table


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (_damaged("crossovers", "norm", 3), r"card\.json: crossovers: norm: expected an object"),
        (_damaged("crossovers", "norms", None), "crossovers: norms: no kernel; expected one of"),
        (_damaged("crossovers", {}), "crossovers: compose: missing"),
        (_damaged("crossovers", "norm", "min", "rows", 1), "norm: min: rows: no size of norm"),
        (_damaged("crossovers", "norm", "min", "in", "1"), "norm: min: in: is '1', expected a pos"),
        (_damaged("crossovers", "norm", "least", {}), "norm: least: expected min or max"),
        (_damaged("configs", "norm", {}), "configs: norm: expected a list"),
        (
            _damaged("configs", "norm", 1, "config", "slot", 1),
            r"norm\[1\]: config: slot: no knob of",
        ),
        (_damaged("configs", "norm", 1, "config", "slots", 0), "slots: is 0, expected a positive"),
        (_damaged("configs", "norm", 1, "config", None), r"norm\[1\]: config: expected an object"),
        (
            _damaged("configs", "project", 0, "config", "band_in_cols", 1),
            r"project\[0\]: config: band_in_cols: is 1, expected true or false",
        ),
    ],
)
def test_a_malformed_table_names_file_kernel_and_field(tmp_path, damaged, message):
    path = tmp_path / "card.json"
    path.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=message):
        tuning.read(path)
