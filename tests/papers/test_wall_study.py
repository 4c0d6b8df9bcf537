"""The study's tables and pictures: what fits by which method, levers, facts, and figures that keep their data."""

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

import madmax_lib as mm
from madmax_lib.papers.studies import memory_levers as levers, memory_wall as wall, wall_plots as plots
from madmax_lib.simulator.memory.memory import PHASES
from madmax_lib.simulator.offload.over_step import moments
from madmax_lib.simulator.step.power import power_phases
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots.steps import COMPONENTS, OTHER

FOUR = mm.cluster("hetero-4xv100")
PLAN = mm.Plan.parse("dp4.mb16.full.offload-chunks")


@pytest.fixture(scope="module")
def table():
    return wall.methods_table(FOUR, ["gpt2_3b", "gpt2_10b", "gpt2_14b", "gpt2_20b"])


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    matplotlib.pyplot.close("all")


def test_methods_by_size(table):
    fits = table.pivot(index="model", columns="method", values="fits")
    assert not fits["DDP"].any() and fits.loc["gpt2_10b", ["Gemini, static", "Gemini, dynamic"]].all()
    assert fits.loc["gpt2_14b"].sum() == 1 and fits.loc["gpt2_14b", "Gemini, dynamic"]
    assert not fits.loc["gpt2_20b"].any()
    assert table.loc[~table["fits"], "step_s"].isna().all() and table.loc[table["fits"], "step_s"].notna().all()


def test_columns_agree(table):
    run = table[table["fits"]]
    tokens = 4 * 16 * 1024
    assert run["tokens_per_s"].to_numpy() == pytest.approx((tokens / run["step_s"]).to_numpy())
    flops = 8 * run["parameters"] * tokens / run["step_s"] / 4 / 1e12
    assert run["tflops"].to_numpy() == pytest.approx(flops.to_numpy())
    assert (run["tflops"] < 125).all() and (run["token_low_j"] < run["token_high_j"]).all()
    assert set(run["bottleneck"]) <= {"compute", "communication", "offload", "host"}


def test_dynamic_placement_is_never_slower(table):
    steps = table.pivot(index="model", columns="method", values="step_s").dropna(subset=["Gemini, static"])
    assert (steps["Gemini, dynamic"] <= steps["Gemini, static"]).all()


def test_hypotheses_about_nine_billion():
    table = wall.hypotheses_table(FOUR)
    fits = table.pivot(index="model", columns="bytes per parameter", values="fits")
    assert fits.loc["gpt2_9b"].all() and fits.loc["gpt2_10b"].tolist() == [True, True, False]
    assert not fits.loc["gpt2_14b"].any()


def test_the_best_share_is_on_the_curve():
    table = wall.share_table(wall.seed_model("gpt2_10b"), FOUR, PLAN, global_batch=64)
    total = table[["passes_s", "drain_s", "update_s", "host_s"]].sum(axis=1)
    best = table.attrs["best"]
    after = total[table["share"] >= best]
    assert 0 < best < 1 and np.interp(best, table["share"], total) <= after.min() + 1e-9


def test_levers_change_one_thing_each():
    plan = mm.Plan.parse("dp8.z1.mb2")
    table = levers.lever_table(mm.model("llama-7b"), mm.cluster("dgx-a100-40"), plan, global_batch=64)
    rows = table.set_index("lever")
    assert rows.loc["as given", "plan"] == str(plan) and rows["plan"].is_unique
    stages = rows.loc[["ZeRO-0", "as given", "ZeRO-2", "ZeRO-3"], "device_gb"]
    assert (stages.diff().dropna() < 0).all()
    assert rows.loc["all to drives", "nvme_gb"] > 0 and rows.loc["recompute full", "device_gb"] < stages["as given"]
    with pytest.raises(ValueError, match="offloads already"):
        levers.lever_table(mm.model("llama-7b"), FOUR, PLAN, global_batch=64)


def test_known_facts_come_out():
    table = levers.known_table()
    assert table["agrees"].all() and len(table) == 21


def test_published_adam():
    assert wall.adam_published()["ratio"].between(0.75, 1.25).all()


def test_measured_adam_is_bound_by_memory():
    """On the large sizes a fused update is within a factor of two of 28 bytes at the best copy rate."""
    table = wall.measured_host()
    copies = table.loc[table["what"] == "host memory", "bytes_per_s"].max()
    fused = table[(table["how"] == "fused") & (table["size"] >= 2**22)]
    assert fused["bytes_per_s"].between(0.5 * copies, 2 * copies).all()


def test_unknown_shape():
    with pytest.raises(ValueError, match="model 'gpt2_1b' is not one of gpt2_3b"):
        wall.seed_model("gpt2_1b")


def drawn(table):
    model = wall.seed_model("gpt2_3b")
    row = mm.estimate(model, FOUR, mm.Plan.parse("dp4.z2.mb16.full"), global_batch=64).iloc[0]
    held = moments(model, FOUR, PLAN, global_batch=64)
    step = mm.simulate(model, FOUR, PLAN, global_batch=64)
    share = wall.share_table(model, FOUR, PLAN, global_batch=64)
    lever = levers.lever_table(model, FOUR, mm.Plan.parse("dp4.z2.mb16"), global_batch=64)
    return {
        "methods": plots.plot_methods(table),
        "energy": plots.plot_token_energy(table[table["model"] == "gpt2_3b"]),
        "power": plots.plot_power(power_phases(row, FOUR.device)),
        "device": plots.plot_moments(held),
        "host": plots.plot_moments(held, "host"),
        "streams": plots.plot_streams(step),
        "share": plots.plot_share(share, share.attrs["best"]),
        "levers": plots.plot_levers(lever, 34e9),
        "adam": plots.plot_adam(wall.measured_host()),
    }


def test_pictures_keep_their_data_and_say_one_thing(table):
    for name, ax in drawn(table).items():
        assert ax.get_title() and figure_data(ax) is not None and len(figure_data(ax)), name
        labels = ax.get_xlabel() + ax.get_ylabel()
        assert ("measured" if name == "adam" else "simulated") in labels, name


def test_every_component_of_memory_has_a_colour_of_its_own():
    assert set(PHASES) <= set(COMPONENTS) and len({*COMPONENTS.values(), OTHER}) == len(COMPONENTS) + 1
