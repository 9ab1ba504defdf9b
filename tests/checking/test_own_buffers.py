"""Buffers of a model, which every rank holds: tables of positions, masks."""

import pytest
from test_large_inputs import MODEL

import planner
from planner.checking.check import check_plan

BUFFERS = MODEL.replace(
    """    return Model()
""",
    """    model = Model()
    for block in model.blocks:
        block.register_buffer("mask", torch.zeros(1000, 1000))
    model.register_buffer("places", torch.zeros(3000, 1000, dtype=torch.int64), persistent=False)
    return model
""",
)
OWN_BYTES = 8 * 4 * 1000 * 1000 + 3000 * 1000 * 8

LAYOUTS = {
    "one": {},
    "sharded": {"dp_shard": 2},
    "stages": {"pp": 2, "schedule": "1F1B"},
    "stages of a rank": {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.bench if name in ("one", "stages") else ())
        for name in LAYOUTS
    ],
)
def test_a_rank_holds_them_all(layout, tmp_path):
    found = []
    for name, source in (("plain", MODEL), ("own", BUFFERS)):
        (tmp_path / f"{name}.py").write_text(source)
        result = planner.estimate(
            str(tmp_path / f"{name}.py"),
            gpus=2 if LAYOUTS[layout] else 1,
            cluster="h100-sxm",
            global_batch_size=8,
            fix={"microbatch_size": 1, **LAYOUTS[layout]},
        )
        result.save(tmp_path / name)
        check = check_plan(tmp_path / name)
        assert all(abs(stage.error) <= 0.03 for stage in check.stages), check.stages
        found.append(check.stages[0].predicted_peak_bytes)
    assert found[1] - found[0] == pytest.approx(OWN_BYTES, rel=0.02)
