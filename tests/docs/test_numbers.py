"""Numbers in the pages are those of the committed results: whole tables, and what sentences say."""

import math

import pytest

from benchmarks.model.protocol import BEST_LORA
from benchmarks.report import Report, time
from benchmarks.results import row, rows
from benchmarks.scaling import Measured
from jax_dora.ops.dispatch import primitive
from tests.tables import thinned
from tools.measured import PAGES, TABLES, updated
from tools.performance_tables import NO_TRITON, ROOT

TEXT = {
    name: (ROOT / name).read_text() for name in (*PAGES, "docs/attempts.md", "docs/fidelity.md")
}
PERFORMANCE, SERVING, SEVERAL, STEP, _ = PAGES
KINDS = ("LoRA", "DoRA")
QWEN_STEP = {"task": "step", "model": "qwen3", "rank": 64}


@pytest.mark.parametrize("page", thinned(PAGES, PAGES[:-1]))  # the last is computed
def test_tables_are_those_of_the_results(page):
    assert TEXT[page] == updated(TEXT[page]), "run `python tools/measured.py`"


def test_every_table_is_quoted_once():
    text = "".join(TEXT.values())
    assert {name: text.count(f"<!-- table: {name} -->") for name in TABLES} == dict.fromkeys(
        TABLES, 1
    )


def test_a_changed_number_is_found():
    text = TEXT[PERFORMANCE]
    changed = text.replace("| 69.6 |", "| 69.7 |")
    assert changed != text
    assert updated(changed) == text


def assert_says(page, *sentences):
    text = " ".join(TEXT[page].split())
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_what_is_said_of_layers():
    layers, ranks = Report.committed("layer"), Report.committed("layer_ranks")
    ops, norms = Report.committed("ops"), Report.committed("ops_norm")
    groups = ("layer forward", "layer forward+backward")
    wide = {"in": 8192, "out": 8192}
    narrow, broad = (
        [ranks.row(group, f"jax DoRA{NO_TRITON}", **wide, rank=rank) for group in groups]
        for rank in (64, 768)
    )
    us, flops = (
        [of(large) / of(small) for small, large in zip(narrow, broad, strict=True)]
        for of in (time, lambda m: m["flops"])
    )
    assert round(flops[0], 2) == round(flops[1], 2)
    triton = ops.row("backward, d_base", "torch triton", rows=4096, out=4096)
    compose = [
        time(ops.row("compose", "jax xla", **m["shape"])) / time(m)
        for m in ops.rows
        if (m["group"], m["variant"]) == ("compose", "mosaic")
        and m["shape"]["rows"] * m["shape"]["out"] >= 4096 * 4096
    ]
    norm = norms.row("norm", "jax mosaic", **wide, rank=64)
    rate = 1e6 * norm["bytes"] / time(norm) / norms.header["ceilings"]["copy"]
    forward, both = (
        layers.ratio(
            layers.row(group, f"jax DoRA{NO_TRITON}", **wide, rank=384), baseline=BEST_LORA
        )
        for group in groups
    )
    assert_says(
        PERFORMANCE,
        f"At rank 64 it reads W at {100 * rate:.0f} % of the copy rate",
        f"with the norm**: {forward:.2f}, goal 1.02.",
        f"Forward and backward: {both:.2f}, goal 1.00.",
        f"the time grows {us[0]:.2f}-fold forward and {us[1]:.2f}-fold forward and backward, "
        f"while the FLOPs grow {flops[0]:.2f}-fold",
        f"{100 * ops.floor_us(triton) / time(triton):.0f} % of the floor",
        f"Mosaic's forward compose** runs at {min(compose):.2f} to {max(compose):.2f} of XLA's "
        "rate",
    )


def test_what_is_said_of_models():
    def ratio(file, group, kept=""):
        report = Report.committed(file)
        measured = report.row(f"model {group}", f"jax DoRA{kept}{NO_TRITON}")
        return f"{report.ratio(measured, baseline=BEST_LORA):.2f}"

    every_call, kept, inner = "model_norm_every_call", ", norm kept", ", norm and inner kept"
    lines = (
        ("norm in every call", ratio(every_call, "inference"), ratio(every_call, "gradient")),
        ("norm kept", ratio("model", "inference", kept), ratio("model", "gradient", kept)),
        ("norm and inner kept", "", ratio("model_gradient", "gradient", inner)),
    )
    cells = (" | ".join(line).replace("|  |", "| |") for line in lines)
    assert_says(PERFORMANCE, *(f"| {line} |" for line in cells))


def test_what_is_said_of_rates():
    names = ("ops", "ops_norm", "ops_swiglu", "layer", "layer_ranks", "model", "model_gradient")
    names += ("model_accumulation", "model_norm_every_call")
    found = [Report.committed(name).header["ceilings"] for name in names]
    copies = {f"{1e-12 * rates['copy']:.1f}" for rates in found}
    products = [round(1e-12 * rates["matmul"]) for rates in found]
    assert len(copies) == 1
    assert_says(
        PERFORMANCE,
        f"the copy rate of the same run, {copies.pop()} TB/s, or of the products at its bf16 rate, "
        f"{min(products)} to {max(products)} TFLOP/s",
    )


def test_what_is_said_of_two_states():
    def walls(kind, state, group):
        fields = {"variant": f"{kind}{NO_TRITON}", "state": state}
        found = [line for line in rows("against", "h200", **fields) if group in line["group"]]
        return [line["wall"]["median"] / 1e3 for line in found]

    def changes(kind):
        both = (walls(kind, state, "layer") for state in ("here", "there"))
        ratios = [here / there - 1 for here, there in zip(*both, strict=True)]
        return f"−{-100 * min(ratios):.0f} to +{100 * max(ratios):.0f} %"

    inference, step = (
        [f"{ms:.1f}" for state in ("there", "here") for ms in walls("DoRA", state, group)]
        for group in ("model inference", "model step")
    )
    assert_says(
        "docs/attempts.md",
        f"of inference was {inference[0]} and {inference[1]} ms, of a whole optimizer step "
        f"{step[0]} and {step[1]} ms",
        f"differ by {changes('DoRA')}, those of LoRA, whose program is the same, by "
        f"{changes('LoRA')}",
    )


def test_what_is_said_of_steps():
    def compiled(kind: str, unroll: bool) -> str:
        found = [
            line["compile_s"]
            for card in ("h100", "h200")
            for line in rows("step", card, kind=kind, unroll=unroll)
        ]
        return f"{min(found):.0f} to {max(found):.0f}"

    assert_says(
        PERFORMANCE,
        *(
            f"compiles in {compiled('DoRA', unroll)} s, LoRA's in {compiled('LoRA', unroll)} s"
            for unroll in (False, True)
        ),
    )
    whole = row("step", "h100", kind="DoRA", budget="all kept that fits, unrolled")
    assert_says(
        PERFORMANCE,
        f"{whole['tokens_per_s']:,.0f} tokens/s, in {whole['over_lora']:.3f} of LoRA's time",
    )


def test_what_is_said_of_quantised_bases():
    steps = {
        (line["kind"], line["qtype"], "keep_inner" in line): line
        for line in rows("quantised", "h100", work="step", name="8B")
    }
    ms = {which: line["ms"] for which, line in steps.items()}
    lora, kept = ms["LoRA", "nf4", False], steps["DoRA", "nf4", True]
    of_bf16, of_lora = (
        ms["DoRA", "nf4", False] / other for other in (ms["DoRA", "bf16", False], lora)
    )
    bf16, *others = (
        row("quantised", "h200", work="projection", kind="DoRA", **fields)["us"]
        for fields in ({"qtype": "bf16"}, {"in_one_piece": True}, {"in_one_piece": False})
    )
    one_piece, apart = (f"{bf16 / other:.2f}" for other in others)
    fast, share = {}, {}  # of 32 rows over nf4, by card
    for card in ("h100", "h200"):
        rate = row("quantised", card, work="copy")["tb_per_s"]
        few = {"work": "few rows", "rows": 32}
        nf4 = row("quantised", card, **few, qtype="nf4")
        (xla,) = rows("quantised", card, **few, implementation="xla")
        fast[card] = f"{xla['us'] / nf4['us']:.2f}"
        share[card] = f"{1e-4 * nf4['bytes'] / nf4['us'] / rate:.0f} %"
    bound, alone = {}, {}  # of both kernels without products
    by_kernel = {"what": "few rows, by kernel", "qtype": "nf4", "rows": 32}
    for card in ("h200", "h100"):
        line = row("tried", card, **by_kernel, variant="no products")
        us = line["us"] + line["finish_us"]
        rate = row("quantised", card, work="copy")["tb_per_s"]
        alone[card] = f"{us:.1f}", f"({line['us']} + {line['finish_us']}"
        bound[card] = f"{1e-4 * nf4['bytes'] / us / rate:.0f} %"
    whole, lookups, products = (
        row("tried", "h200", **by_kernel, variant=variant)["us"]
        for variant in (None, "lookups without products", "no lookups")
    )
    decode = {
        (line["kind"], line["rows"], line["qtype"]): line["ms"]
        for line in rows("quantised", "h100", work="decode")
    }
    faster = {
        kind: [
            f"{decode[kind, count, 'bf16'] / decode[kind, count, 'nf4']:.1f}"
            for count in (1, 8, 32, 64)
        ]
        for kind in ("base", "DoRA")
    }
    kernels = {
        line["kernels"]
        for card in ("h100", "h200")
        for line in rows("quantised", card, work="decode", qtype="nf4", kind="DoRA")
    }
    assert kernels == {15 * 3}
    nf4, int8 = (
        row("quantised", "h200", work="decode", qtype=qtype, kind="DoRA", rows=1)
        for qtype in ("nf4", "int8")
    )
    assert nf4["ms"] > int8["ms"]
    assert nf4["host_ms"] > 0.9 * nf4["ms"]
    varied = [
        line["spread_ms"] / line["ms"]
        for card in ("h100", "h200")
        for line in rows("quantised", card, work="decode", kind="DoRA", qtype="nf4")
    ]
    assert max(varied) > 0.5
    assert_says(
        "docs/small-memory.md",
        "with up to 64 rows is "
        f"{min(faster['base'])} to {max(faster['base'])} times as fast over nf4 as in bf16 with "
        f"the base alone, and {min(faster['DoRA'])} to {max(faster['DoRA'])} times with a bank",
    )
    assert_says(
        PERFORMANCE,
        f"Over nf4 a step of DoRA on an H100 takes {of_bf16:.2f} of the time over bf16, and "
        f"{of_lora:.3f} of LoRA's time",
        f"Over an nf4 base, a step takes {of_bf16:.2f} of the time over a bf16 base",
        f"takes {kept['ms'] / lora:.3f} of LoRA's time, and "
        f"{kept['peak_bytes'] / 2**30:.2f} GiB in all",
        f"32 rows over nf4 reach {fast['h100']} times the speed of bf16 at "
        f"{share['h100']} of the copy rate on an H100, and {fast['h200']} times at "
        f"{share['h200']} on an H200.",
        f"without any products they take {alone['h200'][0]} µs on the H200 {alone['h200'][1]}, "
        f"`h200/tried.jsonl`), {bound['h200']} of it, and {alone['h100'][0]} on the H100 "
        f"{alone['h100'][1]}, `h100/tried.jsonl`), {bound['h100']}. Lookups alone ({lookups}) and "
        f"products alone ({products}) are hidden behind the reading; together they take {whole},",
        f"{one_piece} times as fast as in bf16 if each column of the kernel is contiguous, and "
        f"{apart} times as fast in JAX's default layout",
    )


COUNTS = 1, 8, 32, 64, 128, 256
MIXES = "zipf", "uniform", "one"


def small_blocks(variant, run):
    """Returns the times of decoding in an experiment, relative to the base's."""
    what = "decoding with a bank, smaller thread blocks"
    return {
        (line["mix"], line["rows"]): line["over_base"]
        for line in rows("tried", "h100", what=what, variant=variant, run=run)
    }


def only_reading():
    """Returns the times with kernels that compute nothing, relative to the base's."""
    variant = "only reads A and B"
    return small_blocks(variant, 1) | small_blocks(variant, 2)


def decoding(kind, field):
    """Returns a field of the level `bank` for rows of one token."""
    return {
        (mix, count): row("bank", "h100", task="decode", kind=kind, mix=mix, rows=count)[field]
        for mix in MIXES
        for count in COUNTS
    }


def test_what_is_said_of_goals_that_were_missed():
    rate = row("quantised", "h100", work="copy")["tb_per_s"]
    few = [row("quantised", "h100", work="few rows", qtype="nf4", rows=count) for count in (1, 8)]
    of_copy = [f"{1e-4 * line['bytes'] / line['us'] / rate:.0f}" for line in few]
    steps = {
        (card, line["kind"], "keep_inner" in line): line["ms"]
        for card in ("h100", "h200")
        for line in rows("quantised", card, work="step", name="8B", qtype="nf4")
    }
    (h100, h200), kept = (
        [steps[card, "DoRA", kept] / steps[card, "LoRA", False] for card in ("h100", "h200")]
        for kept in (False, True)
    )
    (gibibytes,) = {
        f"{row('quantised', card, work='step', keep_inner='down_proj')['peak_bytes'] / 2**30:.2f}"
        for card in ("h100", "h200")
    }
    layers = [
        row("quantised", card, **of, qtype="bf16")["ms"]
        / row("quantised", card, **of, qtype="nf4")["ms"]
        for card in ("h100", "h200")
        for of in ({"work": "decode", "kind": "base", "rows": count} for count in (1, 8, 32, 64))
    ]
    dora, reading = decoding("DoRA", "over_base"), only_reading()
    hot = {of: time / dora[of] for of, time in decoding("one-hot", "over_base").items()}
    slow_hot = {of for of, ratio in hot.items() if ratio < 2}
    assert slow_hot == {("uniform", 128), ("uniform", 256), ("zipf", 256)}
    by_reading = [
        decoding("one-hot", "over_base")["uniform", count] / reading["uniform", count]
        for count in (128, 256)
    ]
    missed = {of for of, time in dora.items() if time > 1.15}
    few = {("one", 128)}
    many = {(mix, count) for mix in ("zipf", "uniform") for count in COUNTS if count >= 32}
    assert missed == few | many | {("uniform", 8)}
    least = min(reading[of] for of in missed - few)
    over_lora = decoding("DoRA", "over_lora")
    prompts = {
        (line["mix"], line["tokens"]): line
        for line in rows("bank", "h100", task="prefill", kind="DoRA")
    }
    most = prompts.pop(("one", 512))
    assert_says(
        PERFORMANCE,
        f"128 rows with one adapter take {dora['one', 128]:.3f}, where kernels that only read the "
        f"adapters and compute nothing take {reading['one', 128]:.3f} on another card.",
        f"these take {least:.2f} and more, for 8 rows evenly",
        f"DoRA takes {dora['uniform', 8]:.2f} for 8 rows evenly, and "
        f"{min(dora[of] for of in many):.2f} and more from 32 rows on",
        f"at most {max(over_lora.values()):.3f} for rows of one token, and at most "
        f"{max(line['over_lora'] for line in prompts.values()):.3f} for prompts but for 8 of 512 "
        f"tokens with one adapter, which take {most['over_lora']:.3f}, with a spread of "
        f"{100 * most['spread_ms'] / most['ms']:.0f} %",
        f"by Zipf's law, which are {hot['zipf', 256]:.2f} times as fast, and for 128 and 256 rows "
        f"that choose evenly, {hot['uniform', 128]:.2f} and {hot['uniform', 256]:.2f} times",
        f"would be {by_reading[0]:.2f} and {by_reading[1]:.2f} times as fast",
        f"1 and 8 rows over nf4 reach {of_copy[0]} and {of_copy[1]} % of the copy rate.",
        f"{h100:.3f} of LoRA's time on the same base on an H100 and {h200:.3f} on an H200",
        f"it is {kept[0]:.3f} and {kept[1]:.3f}, in {gibibytes} GiB (goal: 9)",
        f"{min(layers):.1f} to {max(layers):.1f} times over nf4 for up to 64 rows",
    )


def test_what_is_said_of_fp8_on_both_sides():
    what = {"work": "projection", "activations": "float8_e4m3fn", "in_one_piece": True}
    base, dora = (row("quantised", "h100", **what, kind=kind)["us"] for kind in ("base", "DoRA"))
    what = {"what": "FP8 codes in the passes of a decoder layer", "kind": "DoRA"}
    fused, apart = (
        row("tried", "h100", **what, variant=variant)["us"]
        for variant in ("codes in the passes of norms and SwiGLU", "codes in passes of their own")
    )
    assert_says(
        PERFORMANCE,
        f"On an H100, the base alone takes {base:.0f} µs and DoRA {dora:.0f}",
        f"then takes {fused:.0f} µs on an H100, and {apart:.0f} with codes in passes of their own",
    )


def test_what_is_said_of_serving_over_nf4_and_in_pytorch():
    def served(qtype, kind, adapters):
        return row("serve", "h100", qtype=qtype, kind=kind, adapters=adapters)

    bases, banks = (
        [served(one, *which) for one in ("nf4", "bf16")] for which in (("base", 0), ("DoRA", 8))
    )
    faster = [nf4["tokens_per_s"] / bf16["tokens_per_s"] for nf4, bf16 in (bases, banks)]
    first = [f"{line['first_token_ms']:.1f}" for line in bases]
    over_lora = max(line["over_lora"] for line in rows("bank_torch", "h100", kind="DoRA"))
    plain, coded = (
        row("serve_whole", "h200", qtype=qtype, kind="base")["tokens_per_s"]
        for qtype in ("bf16", "nf4")
    )
    of_base = [
        f"{row('serve_whole', 'h200', kind='DoRA', adapters=count)['of_base']:.2f}"
        for count in (8, 64, 256)
    ]
    assert_says(
        "docs/serving.md",
        f"the server is {faster[0]:.2f} times as fast as in bf16 without a bank, and "
        f"{faster[1]:.2f} times with 8 adapters",
        f"comes after {first[0]} ms instead of {first[1]} without a bank",
        f"{plain:,.0f} tokens/s in bf16, and DoRA {of_base[0]}, {of_base[1]} and {of_base[2]} of "
        "that",
        f"over nf4 gives {coded:,.0f}",
        f"at most {over_lora:.3f} of LoRA's time (goal: 1.05)",
    )


def test_what_is_said_of_prompts_and_of_the_runs_of_a_bank():
    def prompt(tokens, way):
        what = "small prompts with a bank, tiles of 64 rows, one layer"
        of = {"what": what, "kind": "DoRA", "requests": 1, "each": tokens, "way": way}
        return row("tried", "h100", **of)["over_base"]

    as_rows = "each token as a row, kernels at the same time"
    concurrent, by_xla = prompt(256, as_rows), prompt(256, "XLA's products")
    alone = prompt(256, "each token as a row")
    dora, reading = decoding("DoRA", "over_base"), only_reading()
    for count in (32, 64, 128, 256):
        assert abs(dora["one", count] / reading["one", count] - 1) <= 0.05
    small = small_blocks("1 slice, 8 stages", 2)
    served = {
        (line["kind"], line["decoding_options"]): f"{line['ms']:.2f}"
        for line in rows(
            "tried", "h100", what="prefill by a server's runner, 256 tokens, 4 layers", qtype="bf16"
        )
    }
    one, eight = (
        row("bank", "h100", task="decode", kind="base", mix="zipf", rows=count)["ms"]
        for count in (1, 8)
    )
    assert one > eight
    grown = {
        count: [
            row("bank", "h100", mix="growth", adapters=count, kind=kind)["ms"] for kind in KINDS
        ]
        for count in (1, 4, 16, 64, 256, 1024)
    }
    count, slower = max(
        ((count, lora / dora) for count, (lora, dora) in grown.items()), key=lambda one: one[1]
    )
    (torch, ours) = (
        Report.committed(name, "h100").header["environment"] for name in ("serve_torch", "serve")
    )
    assert_says(
        SERVING,
        f"256 tokens of one prompt take {concurrent:.2f} of the base model's time, where XLA's "
        f"products take {by_xla:.2f}",
        f"take {alone:.2f} of the base model's time instead of {concurrent:.2f}",
        f"32 rows that choose evenly took {small['uniform', 32]:.2f} on the card",
        f"DoRA takes {served['DoRA', 'with']} ms with the options and {served['DoRA', 'without']} "
        f"without them, and the base model {served['base', 'with']} and "
        f"{served['base', 'without']}",
        "The base model alone takes longer for 1 row than for 8",
        f"with {count:,} adapters LoRA takes {slower:.2f} of DoRA's time",
        f"at commit {torch['commit']} with PEFT {torch['peft']}, whereas the server was measured "
        f"at {ours['commit']}.",
    )


def test_what_is_said_of_rows_of_the_base_on_two_gpus():
    what = {"what": "rows of the base in a bank, by process", "tokens": 16}
    chosen = rows("tried", "h200x2", options="default", **what)
    unequal = [line for line in chosen if line["differ"]]
    (differ,) = {line["differ"] for line in unequal}
    most = max(line["max_difference"] for line in unequal)
    assert_says(
        "docs/fidelity.md",
        f"in {len(unequal)} of {len(chosen)} processes {differ} of {unequal[0]['numbers']:,} "
        f"numbers differed, by {most:.1e} at most, and none with",
    )
    fixed = rows("tried", "h200x2", options="xla_gpu_exclude_nondeterministic_ops", **what)
    assert [line["differ"] for line in fixed] == [0] * len(chosen)


def test_what_is_said_of_the_newest_jax():
    def us(work, qtype, **fields):
        of = {"work": work, "qtype": qtype} | fields
        new, old = (row("newest_jax", "h200", jax=jax, **of) for jax in ("0.12.0.1", "0.11.2"))
        return f"{new['us']:.1f} µs instead of {old['us']:.1f}"

    nf4, int8, bf16 = (us("norm", qtype).replace(" µs", "") for qtype in ("nf4", "int8", "bf16"))
    assert_says(
        PERFORMANCE,
        f"32 rows over nf4 {us('few rows', 'nf4', rows=32)}, the norm over nf4 {nf4}, over int8 "
        f"{int8}, over bf16 {bf16}.",
    )


def test_what_is_said_of_attempts():
    ops, swiglu = Report.committed("ops"), Report.committed("ops_swiglu")

    def times(of, group, labels, **shape):
        return [f"{time(of.row(group, f'jax {label}', **shape)):.1f}" for label in labels]

    def dropped(group):
        shape = {"rows": 4096, "in": 8192, "rank": 64}
        mosaic, *xla = times(ops, group, ("mosaic", "xla", "xla, Triton allowed"), **shape)
        return mosaic, min(xla)

    (z, xla_z), (d_a, xla_d_a) = (dropped(f"dropout, {name}") for name in ("z", "dA"))
    backward = times(ops, "backward, d_base", ("xla", "mosaic"), rows=4096, out=4096)
    square = {"in": 8192, "out": 8192, "rank": 384}
    norm = times(Report.committed("ops_norm"), "norm", ("mosaic", "factored"), **square)
    expand = times(ops, "expand+compose", ("mosaic", "xla"), rows=4096, out=8192, rank=384)
    whole = {"rows": 4096, "in": 8192, "out": 8192, "rank": 384}
    project = times(ops, "projection", ("mosaic", "xla"), **whole)
    gated = times(swiglu, "SwiGLU's gradient", ("mosaic", "apart", "xla"), rows=4096, out=12288)
    assert_says(
        "docs/attempts.md",
        f"XLA takes {backward[0]} µs and the kernel {backward[1]}",
        f"{norm[0]} µs at 8192 × 8192 and rank 384, where the factored norm in XLA takes {norm[1]}",
        f"{expand[0]} µs against XLA's {expand[1]}",
        f"{project[0]} µs, where XLA's base product, expansion and compose take {project[1]}",
        f"z {z} µs against {xla_z}, dA {d_a} against {xla_d_a}",
        f"{gated[0]} µs where three passes take {gated[1]} and XLA's fusions of the same formulas "
        f"{gated[2]}",
    )


def test_what_is_said_of_four_bits_in_torch():
    ours, peft = (
        row("quantised_torch", "h200", kind=f"{package} DoRA, bf16 adapters, nf4")
        for package in ("torch_dora", "PEFT")
    )
    assert_says(
        "docs/small-memory.md",
        f"takes {ours['over_lora']:.2f} of the time of PEFT's LoRA",
        f"PEFT's DoRA takes {peft['over_lora']:.2f} (",
        f"{ours['losses'][-1]:.3f} and {peft['losses'][-1]:.3f} after eight steps",
    )


def test_what_is_said_of_several_gpus():
    def profile(layout, kind, **fields):
        return row("profile", "h200x2", layout=layout, kind=kind, **fields)

    parts, whole = {"blocks": "multiprocessors"}, {"blocks": "tiles"}
    lora, lora_dp = (profile(layout, "LoRA") for layout in ("fsdp", "dp"))
    dora, dora_dp = profile("fsdp", "DoRA", **whole), profile("dp", "DoRA", **parts)
    products = sum(dora[f"{name}_ms"] for name in ("project", "project_back", "products"))

    def several(**fields):
        found = [line["over_lora"] for line in rows("scale", "h200x2", kind="DoRA", **fields)]
        return f"{min(found):.2f} to {max(found):.2f}"

    tp, dp, fsdp = (
        several(task="step", axes="auto", layout=layout) for layout in ("tp", "dp", "fsdp")
    )
    sent = {
        (kind, layout, axes): f"{line['sent_bytes'] / 1e6:.1f}"
        for layout in ("dp", "fsdp")
        for kind in ("DoRA", "LoRA")
        for axes in ("auto", "explicit")
        for line in [row("scale", "h200x2", kind=kind, layout=layout, axes=axes, **QWEN_STEP)]
    }
    assert sent["DoRA", "dp", "explicit"] == sent["DoRA", "dp", "auto"]

    def in_a_row(kind, **fields):
        return rows("scale_in_a_row", "h200x2", kind=kind, **fields)

    longer = [
        f"{in_a_row(kind, layout='dp', **fields)[0]['ms'] / alone['ms']:.3f}"
        for rank in (64, 384)
        for kind in ("LoRA", "DoRA")
        for fields in [{"rank": rank, "model": "qwen3"}]
        for alone in in_a_row(kind, layout="alone", **fields)
    ]
    scaling = Measured.read()
    errors = [
        abs(scaling.predicted(kind, layout, 2) / scaling.ms(kind, layout, "step") - 1)
        for kind in ("LoRA", "DoRA")
        for layout in ("fsdp", "tp")
    ]
    assert_says(
        SEVERAL,
        f"the rate is {round(scaling.link, -1):.0f} GB/s",
        f"on two GPUs to within {math.ceil(100 * max(errors))} %",
    )
    before = [line["over_lora"] for line in in_a_row("DoRA", layout="fsdp")]
    most = max(line["over_lora"] for line in rows("scale", "h200x2", kind="DoRA", task="step"))
    kept = [line["over_lora"] for line in in_a_row("DoRA, inner kept")]
    assert_says(
        SEVERAL,
        f"Inference takes {several(task='inference')} of LoRA's time.",
        f"A step takes {tp} of LoRA's time with tensor parallelism, {dp} with data parallelism and "
        f"{fsdp} under FSDP, on automatic axes. On explicit axes it takes "
        f"{several(task='step', axes='explicit')}.",
        f"{sent['LoRA', 'dp', 'explicit']} instead of {sent['LoRA', 'dp', 'auto']} MB under data "
        f"parallelism at rank 64, where DoRA sends {sent['DoRA', 'dp', 'auto']} on both.",
        f"the largest is {most:.3f}.",
        f"all others {1e6 * primitive.SECONDS:.0f} µs",
        f"under FSDP a step took up to {max(before):.2f} of LoRA's time",
        f"A step then took {min(kept):.2f} to {max(kept):.2f} of LoRA's time",
        f"a step takes {longer[0]} times as long with LoRA and {longer[1]} with DoRA at rank 64, "
        f"and {longer[2]} and {longer[3]} at rank 384.",
        f"sends {sent['DoRA', 'dp', 'auto']} MB under data parallelism, and "
        f"{sent['LoRA', 'dp', 'auto']} MB with LoRA. Under FSDP it sends "
        f"{sent['DoRA', 'fsdp', 'auto']} MB, and {sent['LoRA', 'fsdp', 'auto']} MB with LoRA.",
        f"computes for {dora['computing_ms']:.1f} ms and waits {dora['exposed_ms']:.1f} ms for "
        f"collectives that nothing overlaps. LoRA computes for {lora['computing_ms']:.1f} ms and "
        f"waits {lora['exposed_ms']:.1f} ms.",
        f"DoRA's products take {products:.1f} ms, LoRA's {lora['products_ms']:.1f} ms",
        f"(copies take {lora_dp['copies_ms']:.1f} ms with LoRA, {dora_dp['copies_ms']:.1f} ms with "
        "DoRA)",
        f"({lora['copies_ms']:.1f} and {dora['copies_ms']:.1f} ms)",
    )
    usual = [
        f"{in_a_row(kind, layout='fsdp', model='qwen3')[0]['ms']:.1f}" for kind in ("LoRA", "DoRA")
    ]
    flagged = [f"{row('scale_slices', 'h200x2', kind=kind)['ms']:.1f}" for kind in ("LoRA", "DoRA")]
    without, kernel, xla = (
        {
            (line["what"], line["model"], line["rank"]): line["ms"]
            for card in ("h100x2", "h200x2")
            for line in rows("tried", card, kind="DoRA", axes="auto", variant=variant)
        }
        for variant in ("without times", "with times, z by a kernel", "with times, z by XLA")
    )
    small, low = (("step, fsdp", model, 64) for model in ("qwen3", "llama3"))
    large = "step, fsdp", "llama3", 384

    def of_kinds(variant):
        lines = [
            row("tried", "h200x2", rank=384, variant=variant, kind=kind)
            for kind in ("DoRA", "LoRA")
        ]
        return [f"{line['ms']:.1f}" for line in lines] + [f"{lines[0]['over_lora']:.3f}"]

    within = of_kinds("z in the projection, behind gathers")
    xla_waits = of_kinds("z by XLA, behind the gather")
    at_once = of_kinds("z by XLA, without waiting")
    waits = of_kinds("z by a kernel, behind the gather")
    divided = {
        inputs: [
            row("tried", "h200x2", what=what, **{"in": inputs})["us"]
            for what in ("x A by XLA, divided", "x A by XLA, divided, as estimated")
        ]
        for inputs in (4096, 14336)
    }

    def by_kernel(variant=None, **fields):
        found = rows("tried", "h100", what="few rows, by kernel", qtype="nf4", **fields)
        (line,) = [line for line in found if line.get("variant") == variant]
        return {name: f"{line[name]:.1f}" for name in ("us", "finish_us")}

    assert_says(
        "docs/attempts.md",
        f"a step takes {flagged[0]} ms with LoRA and {flagged[1]} with DoRA",
        f"a step of 12 layers takes {xla[small]:.1f} ms instead of {without[small]:.1f}",
        f"where in series of four they take {usual[0]} and {usual[1]}",
        f"takes {kernel[large]:.1f} ms instead of {xla[large]:.1f} on two H200s",
        f"at rank 64 {kernel[low]:.1f} instead of {xla[low]:.1f} on two H100s",
        f"{xla_waits[0]} ms, where LoRA takes {xla_waits[1]}.",
        f"{within[0]} ms, where LoRA takes {within[1]}.",
        f"takes {waits[0]} ms, where LoRA takes {waits[1]}, a ratio of {waits[2]}; before, on "
        f"other cards, {at_once[0]} and {at_once[1]}, a ratio of {at_once[2]}",
        *(
            f"with {inputs:,} inputs {measured:.1f} µs, which it takes for {estimated:,.0f}"
            for inputs, (measured, estimated) in divided.items()
        ),
        "32 rows take {us} µs for the products and {finish_us} for the sums".format_map(
            by_kernel(rows=32)
        ),
        "8 rows {us} and {finish_us}.".format_map(by_kernel(rows=8)),
        "Without copies of x, 32 rows take {us} µs".format_map(by_kernel(rows=32, variant="no x")),
        "without products {us}.".format_map(by_kernel(rows=32, variant="no products")),
    )


def test_what_is_said_of_parts():
    found = [line for line in rows("step_table", "h100") if line["kind"] == "as it is"]
    losses = [line["loss"] for line in found]
    at_once = row("step_table", "h100", kind="cross-entropy of all logits at once")
    more = (at_once["temp_bytes"] - found[0]["temp_bytes"]) / 2**30
    times = {
        line["kind"].replace(", bf16 adapters", ""): line["ms"]
        for line in rows("step_torch", "h200")
    }
    ours, ours_compiled = times["torch_dora DoRA"], times["torch_dora DoRA, compiled"]
    assert_says(
        STEP,
        f"ends between {min(losses):.3f} and {max(losses):.3f} in three runs",
        f"the time of all logits at once, and {more:.1f} GiB less memory",
        f"takes {ours / times['PEFT LoRA']:.2f} of the time of PEFT's LoRA and "
        f"{ours / times['PEFT DoRA']:.2f} of the time of PEFT's DoRA",
        f"{ours_compiled / times['PEFT DoRA, compiled']:.2f} of the time of PEFT's DoRA",
        f"LoRA takes {times['PEFT LoRA, compiled'] / ours_compiled:.2f} of torch_dora's time",
    )
    assert len(losses) == 3
