"""Of metrics.jsonl what is sound up to the first damage counts, and no step twice."""

import json

import pytest

from jax_dora.lm.finetune.log import Log

LINE = {"loss": 2.5, "gradient_norm": 1, "learning_rate": 1e-4, "tokens_per_second": 10.0}


def written(folder, *lines):
    file = folder / "metrics.jsonl"
    file.write_text("".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return file


def line(step, **more):
    return json.dumps({"step": step} | LINE | more) + "\n"


@pytest.mark.parametrize(
    "damaged",
    [
        line(2).replace("loss", "lpss"),
        line(2, eval_loss=1.5).replace("eval_", "evam_"),
        line(2).replace("2.5", '"x"'),
        line(2).replace("2.5", "true"),
        line(1),
        line(True),
        line(2)[:-1],
        line(2)[:20] + "\n",
        "[2]\n",
    ],
)
def test_damage_ends_it(damaged, tmp_path):
    file = written(tmp_path, line(1, eval_loss=3), damaged, line(3))
    with Log(tmp_path, 3) as log:
        assert [one["step"] for one in log.lines] == [1]
        log.add(json.loads(line(4)))
    assert file.read_text() == line(1, eval_loss=3) + line(4)
    with Log(tmp_path, 4) as log:  # the gap stays
        assert [one["step"] for one in log.lines] == [1, 4]


def test_what_is_not_done_goes(tmp_path):
    file = written(tmp_path, line(1), line(2), line(3))
    with Log(tmp_path, 2) as log:
        assert [one["step"] for one in log.lines] == [1, 2]
    assert file.read_text() == line(1) + line(2)
