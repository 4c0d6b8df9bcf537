"""The vision transformers of MAD-Max: the sheet as rows, and how far predictions from the other runs are off."""

import pandas as pd
import pytest
from support import local_or_skip

from madmax_lib.calibration.vision import _vision_rows, vision_errors


def test_rows_follow_the_sheet():
    rows = _vision_rows("gathers in turn")
    assert len(rows) == 9 and rows["supported"].all() and rows["group"].is_unique
    large = rows[rows["model"] == "ViT-L"].iloc[0]
    assert large["measured_s"] == pytest.approx(3 * 0.122e12 * 4096 / 32 / 46.233e12)
    assert (large["layers"], large["hidden"], large["sequence"]) == (24, 1024, 197)
    # activations of 128 samples fit without recompute up to ViT-H, and no larger model fits
    recomputed = rows.loc[rows["recompute_gemm"] > 0, "model"]
    assert set(recomputed) == {"ViT-10B", "ViT-25B", "ViT-60B", "ViT-120B"}
    assert not set(recomputed) & set(rows.loc[rows["recompute_gemm"] == 0, "model"])


def test_the_sheet_is_typed_as_published():
    sheet = pd.read_csv(local_or_skip("madmax_ref/artifact_vit_validation.csv"))
    rows = _vision_rows("gathers in turn")
    assert rows["measured"].to_numpy() / 1e12 == pytest.approx(sheet["measured_tflops_per_gpu"].to_numpy(), rel=1e-4)
    assert (rows["micro_batch"].to_numpy() == sheet["local_bs"].to_numpy()).all()


def test_ways_differ_in_one_habit_each():
    hidden, kept, in_turn = (_vision_rows(way) for way in ("gathers hidden", "weights kept", "gathers in turn"))
    same = [name for name in hidden.columns if name not in ("zero", "tensorwise")]
    pd.testing.assert_frame_equal(hidden[same], kept[same])
    pd.testing.assert_frame_equal(hidden[same], in_turn[same])
    assert (hidden["zero"] == 3).all() and (kept["zero"] == 2).any() and in_turn["tensorwise"].all()


def test_mean_relative_error():
    """Asked: at most 20 %, by constants that have not seen the run; the paper's own model 38.5 %."""
    errors = vision_errors()
    assert errors["paper_error"].abs().mean() == pytest.approx(0.385, abs=0.001)
    assert errors["ours_error"].abs().mean() < 0.20  # 19.3 %
    assert errors["ours_error"].abs().median() < 0.15  # 13.3 %
    assert (errors["ours_error"].abs() > 0.3).sum() == 2  # ViT-10B on 128 GPUs, ViT-25B on 32
    assert errors["measured"].iloc[0] == pytest.approx(46.233 / 312)
    with pytest.raises(ValueError, match="way='fast' is not one of gathers hidden, weights kept, gathers in turn"):
        vision_errors("fast")
