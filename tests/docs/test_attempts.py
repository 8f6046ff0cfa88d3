"""Numbers in the page about what was tried are those of the committed results."""

import re

from benchmarks.results import row, rows
from tests.docs.test_numbers import TEXT, assert_says

PAGE = "docs/attempts.md"

FILES = {
    *("tried", "norm_kernels", "few_rows", "bank_kernels", "h100/tried", "h200x2/profile"),
}
# A difference, which no file has.
COMPUTED = {"0.6"}


def test_numbers_of_what_was_tried_are_those_of_the_files_that_a_paragraph_names():
    found = 0
    for paragraph in re.split(r"\n\n|\n(?=- )", TEXT[PAGE]):
        names = set(re.findall(r"`((?:\w+/)?\w+)\.jsonl`", paragraph))
        if names & FILES:
            paths = [name.rpartition("/") for name in names]
            measured = [
                value if isinstance(value, float) else value / 1e9
                for card, _, name in paths
                for line in rows(name, card or "h200")
                for field, value in line.items()
                if (
                    re.fullmatch(r"us|ms|\w+_us|\w+_ms|tokens_per_s", field)
                    and isinstance(value, float)
                )
                or field == "temp_bytes"
            ]
            # With a point, or of four digits.
            said = re.findall(r"(?<![\w.])(?:\d[\d,]*\.\d+|\d+,\d{3})(?!\w)", paragraph)
            digits = {len(number.partition(".")[2]) for number in said}
            known = {f"{value:,.{count}f}" for value in measured for count in digits}
            assert set(said) <= known | COMPUTED, paragraph
            found += len(said)
    assert found > 50


def test_what_is_said_of_few_rows():
    def us(**fields):
        plain = {"slots", "stages", "variant", "implementation"} - fields.keys()
        found = rows("few_rows", "h200", **fields)
        (line,) = (line for line in found if not plain & line.keys())
        return line["us"]

    ours, lora = {"work": "few rows", "qtype": "bf16"}, {"work": "LoRA by XLA"}
    narrow, wide = {"features": 4096, "rank": 64}, {"features": 8192, "rank": 16}
    of = [us(**work, **narrow, rows=count) for count in (8, 64) for work in (ours, lora)]
    bf16, by_xla = us(**ours, **wide, rows=8), us(**ours, **wide, rows=8, implementation="xla")
    int8, nf4 = ({"work": "few rows", "qtype": one, **wide} for one in ("int8", "nf4"))
    apart = us(**ours, **narrow, rows=64, variant="no pairs")
    warps = [
        us(**one, rows=32, **by) for one in (nf4, int8) for by in ({"variant": "by warps"}, {})
    ]
    assert_says(
        PAGE,
        f"rank 64, 8 rows: {of[0]:.1f} µs, where XLA's LoRA takes {of[1]:.1f}; 64 rows {of[2]:.1f} "
        f"and {of[3]:.1f}.",
        f"8 rows: bf16 {bf16:.1f} µs, by XLA {by_xla:.1f}; int8 {us(**int8, rows=8):.1f}, nf4 "
        f"{us(**nf4, rows=8):.1f}.",
        f"64 rows take {apart:.1f} µs instead of {of[2]:.1f}",
        f"(int8, 8 rows: {us(**int8, rows=8, slots=2):.1f} against {us(**int8, rows=8):.1f} µs)",
        f"(nf4 {warps[0]:.1f} against {warps[1]:.1f}, int8 {warps[2]:.1f} against {warps[3]:.1f})",
        f"nf4 {us(**nf4, rows=1) - us(**nf4, rows=1, variant='nothing held'):.1f} µs",
    )


def test_what_is_said_of_banks():
    def us(count, in_use, turns, over_base, work="qkv"):
        fields = {"rows": count, "in_use": in_use, "turns": turns, "over_base": over_base}
        found = row("bank_kernels", "h200", work=work, **fields)
        return [found[f"{name}_us"] for name in ("shrink", "expand", "others")]

    one, four = [1, 1], [4, 4]
    few, many = us(8, 1, one, False), us(64, 64, one, True)
    by_four, many_by_four = us(8, 1, four, False), us(64, 64, four, True)
    apart = us(64, 64, four, False)
    single = us(1, 1, one, False)
    assert_says(
        PAGE,
        f"{by_four[0]:.1f} and {by_four[1]:.1f} µs for 8 rows of one slot, and "
        f"{many_by_four[0]:.1f} and {many_by_four[1]:.1f} for 64 rows of 64, where one "
        f"warpgroup takes {few[0]:.1f} and {few[1]:.1f}, and {many[0]:.1f} and {many[1]:.1f}.",
        f"{apart[1]:.1f} µs instead of {many_by_four[1]:.1f}, and {apart[2]:.1f} for XLA's part",
        f"The time of one row, {single[0]:.1f} and {single[1]:.1f} µs",
    )
    layer = {"work": "layer", "rows": 64}
    dora, by_row = (
        row("bank_kernels", "h200", kind=kind, **layer) for kind in ("DoRA", "DoRA, g by row")
    )
    assert_says(
        PAGE,
        f"{by_row['expand_us']:.1f} µs of a layer of 64 rows instead of {dora['expand_us']:.1f}",
    )


def test_what_is_said_of_what_was_tried():
    def us(*more, **fields):
        return [f"{row('tried', 'h200', **fields, **one)['us']:.1f}" for one in more]

    nf4 = {"qtype": "nf4", "features": 8192}
    shared, read = ("one after the other", "side by side"), ("each two codes", "each run")
    bank = [
        us(*({"kernels": one} for one in shared), what="bank", kind=kind, rows=count)
        for kind, count in (("DoRA", 8), ("DoRA", 1), ("base", 8), ("base", 1))
    ]
    scales = [{"scales": f"read for {one}"} for one in read]
    codes = us(*scales, what="torch_dora's norm of codes", **nf4, rank=16)
    floats = us({}, what="torch_dora's norm", rank=16)
    strips = us({"tile_cols": 192}, {"tile_cols": 128}, what="norm", **nf4, rank=384)
    splits = us({"splits": 4}, {"splits": 16}, what="few rows", **nf4)
    chosen, own8, own32 = (
        f"{one['us']:.1f}"
        for one in rows("tried", "h200", what="few rows", **nf4)
        if not one.keys() & {"splits", "variant"}
    )
    shared8, shared32 = us({"rows": 8}, {"rows": 32}, variant="two warpgroups share a tile", **nf4)
    stages = us(*({"stages": count} for count in (4, 12, 8)), what="bank rows")
    codes32 = [f"{one['us']:.1f}" for one in rows("tried", "h200", what="32 rows over nf4")]
    assert_says(
        PAGE,
        f"8 rows by Zipf's law took {bank[0][1]} µs a layer instead of {bank[0][0]}, and one row "
        f"{bank[1][1]} instead of {bank[1][0]}, where the base takes {bank[2][1]} and {bank[3][1]}",
        f"where the kernels in use take {codes32[0]} µs, with products of four columns at a time, "
        f"which need fewer registers: {codes32[1]} µs. In addition with a share of the sums for "
        f"each consumer: {codes32[2]}; with lookups one step ahead of the products, across tiles, "
        f"too: {codes32[3]}. With three consumers: {codes32[4]}, and {codes32[5]} with lookups "
        f"ahead. With four consumers and products of two columns: {codes32[6]}.",
        f"rank 16 it took {codes[0]} µs when it read a scale for every two codes, and takes "
        f"{codes[1]} with one read for each run of codes; over bf16 it takes {floats[0]}",
        f"Over nf4 they take {strips[0]} µs, with three slices of A in flight, where strips of 128 "
        f"take {strips[1]}",
        f"{splits[0]} and {splits[1]} µs, where the chosen number takes {chosen}",
        f"8 rows take {shared8} µs instead of {own8}, 32 rows {shared32} instead of {own32}",
        f"{stages[0]} and {stages[1]} µs, where 8 take {stages[2]}",
    )


def test_what_is_said_of_kernels_beside_the_base_s():
    def us(layers, **fields):
        return f"{row('tried', 'h100', what=f'bank, {layers} layers', **fields)['us']:.1f}"

    def few(shrink, expand):
        stages = {"shrink_stages": shrink, "expand_stages": expand}
        return us("four", kernels="bank_few_rows", rows=8, mix="zipf", tiles=8, **stages)

    ways = "base", "XLA ends the projection", "second kernel ends the projection", "XLA"
    base, split, ended, by_xla = (us("three", rows=8, way=one) for one in ways)
    many = [
        us("four", kernels="bank_rows", rows=32, mix="zipf", shrink_stages=stages)
        for stages in (4, 16)
    ]
    base_us, prompts = (
        row("tried", "h100", what="bank, prompts", kind=k) for k in ("base", "DoRA")
    )
    assert_says(
        PAGE,
        f"{prompts['us']:,.1f} µs in all where the base takes {base_us['us']:,.1f}, had "
        f"{prompts['copies_us']:.1f} µs of copies and {prompts['idle_us']:.1f} µs in which",
        f"the base {base} µs a layer",
        f"{split} µs instead of {ended}, and {by_xla} with XLA's own methods",
        f"in flight a layer took {few(8, 4)} µs, with 4 and 4 {few(4, 4)}, with 4 and 8, which "
        f"fetches all adapters in use at once, {few(4, 8)}",
        f"{many[0]} µs with 4 tiles in flight instead of {many[1]}",
    )


def test_what_is_said_of_two_gpus():
    def ms(name, layout, blocks):
        found = row("profile", "h200x2", layout=layout, kind="DoRA", blocks=blocks)
        return f"{found[f'{name}_ms']:.1f}"

    parts, whole = "multiprocessors", "tiles"
    assert_says(
        PAGE,
        f"projections took {ms('project', 'fsdp', parts)} ms of a step under FSDP and "
        f"{ms('project', 'dp', parts)} under data",
        f"With a block for each tile they take {ms('project', 'fsdp', whole)} under FSDP. If "
        f"nothing else runs at the same time, such blocks cost time ({ms('project', 'dp', whole)}",
        f"takes as long either way ({ms('project_back', 'dp', parts)} and "
        f"{ms('project_back', 'dp', whole)} ms)",
    )


def test_what_is_said_of_4_bit_layers_in_a_training_step():
    as_bytes, usual = (
        row("tried", "h100", what=what, name="8B", kind="DoRA", keep_inner=None)["temp_bytes"] / 1e9
        for what in (
            "step over nf4 with 4-bit layers taken as bytes",
            "step over nf4 after 4-bit layers are taken as bytes in inference",
        )
    )
    assert_says(PAGE, f"({as_bytes:.2f} GB of temporary memory instead of {usual:.2f} for the 8B")
    clusters = row("tried", "h100", what="clusters that fit at the same time")
    assert_says(PAGE, f"only {clusters['of_four']} such clusters fit on an H100 at the same time")


def test_what_is_said_of_a_profile_of_few_rows():
    line = row("tried", "h100", what="few rows, profile by ncu")
    features, rows_of_x, multiprocessors = line["features"], line["rows"], 132
    # Bytes of the codes, of fp32 scales of tiles of 64, and of x for each tile of 64 × 256.
    copied = features**2 * (1 / 2 + 4 / 64) + features**2 / 256 * rows_of_x * 2
    # A wgmma reads 16 columns of x in 16 bits; shared memory moves 128 bytes a cycle.
    read = line["wgmmas"] * 16 * rows_of_x * 2
    cycles = line["loads_of_shared_memory_wavefronts"] + (read + copied) / 128
    assert_says(
        PAGE,
        f"take {cycles / multiprocessors / 1e3:.0f} thousand of "
        f"{line['sm_active_cycles'] / 1e3:.0f} thousand cycles",
        f"issue an instruction in {line['issue_slots_busy_percent']:.0f} % of the cycles",
    )
