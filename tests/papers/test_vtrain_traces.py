"""Operators of vTrain from its own trace and from recorded steps."""

from dataclasses import astuple, replace
from pathlib import Path

import pytest

import madmax_lib as mm
from madmax_lib.papers import vtrain
from madmax_lib.papers.vtrain.config import Config, VTrainRules

TRACES = Path(__file__).parents[2] / "traces"
# operator and, by kernel, start and duration on the device in ns
PROFILE = {
    "forward embeddings": [(100, 7)],
    "forward transformer": [(200, 30), (235, 20)],
    "forward logit": [(300, 5)],
    "forward loss": [(310, 2)],
    "backward loss": [(320, 4)],
    "backward logit": [(330, 9)],
    "backward transformer": [(400, 60)],
    "backward embeddings": [(500, 8)],
    "WU embeddings": [(600, 3)],
    "WU transformer": [(700, 6)],
}


def trace_of(profile):
    """Text of a trace: an operator is open for 10 ns on the host, its kernels run later."""
    lines = ["1,1,RUNTIME,cudaLaunchKernel,1", "50,4,KERNEL,stray,0,1"]
    for at, (operator, kernels) in enumerate(profile.items()):
        phase, name = operator.split()
        lines.append(f"{10 * at + 2},0,TIMESTAMP,{phase} start {name},0")
        lines.append(f"{10 * at + 9},0,TIMESTAMP,{phase} end {name},0")
        for number, (start, duration) in enumerate(kernels):
            launch = 100 * (at + 1) + number
            call = ("RUNTIME", "DRIVER")[number]
            lines.append(f"{10 * at + 3 + number},1,{call},launch,{launch}")
            lines.append(f"{start},{duration},KERNEL,gemm<a, b>,7,[1 1 1],{launch}")
    return "\n".join(lines)


def test_kernels_count_with_their_gaps_for_the_operator_that_launched_them(tmp_path):
    (tmp_path / "trace").write_text(trace_of(PROFILE))
    operators = vtrain.load_trace(tmp_path / "trace")
    # forward and backward of a layer, the embedding and the output, then updates
    ns = [55, 60, 7, 8, 7, 13, 6, 3]
    assert astuple(operators) == pytest.approx([1e-9 * each for each in ns])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nkernel took long", "line 2 is not start_ns"),
        ("5,0,TIMESTAMP,forward start logit,0", "without the other mark"),
        ("5,0,TIMESTAMP,forward end logit,0", "without the other mark"),
        (
            "1,0,TIMESTAMP,WU start loss,0\n5,0,TIMESTAMP,WU end logit,0",
            "without the other mark",
        ),
        ("5,1,RUNTIME,x,1", "no kernel was launched in 'forward transformer'"),
    ],
)
def test_broken_traces_are_refused(tmp_path, text, message):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match=message):
        vtrain.load_trace(tmp_path / "trace")


GPT = Config(
    tensor_parallel_size=1,
    data_parallel_size=1,
    pipeline_parallel_size=1,
    global_batch_size=8,
    micro_batch_size=8,
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    max_length=64,
    vocab_size=512,
)


@pytest.mark.parametrize(
    ("trace", "layers", "ends"), [("gpt-ddp", 4, 0.09), ("vit-h100", 32, 0.03)]
)
def test_a_recorded_step_comes_out_of_its_operators(trace, layers, ends):
    """Compute of the step is the sum of its parts; the ends of the model are small."""
    timeline = mm.read_trace(TRACES / trace).select(ranks=[0])
    timeline = timeline.select(steps=timeline.steps[:1])
    operators = vtrain.operators_of(timeline, replace(GPT, num_layers=layers))
    calls = mm.traces.operators(timeline)
    compute_s = calls[~calls["name"].str.match("c10d|nccl|record_param")][
        "self_device_s"
    ].sum()
    rules = VTrainRules(recompute="none")
    config = replace(GPT, num_layers=layers)
    step_s = vtrain.iteration_s(config, operators, vtrain.RINGS, rules)
    assert step_s == pytest.approx(compute_s, rel=0.01)
    assert 1.5 < operators.backward_s / operators.forward_s < 3
    inside_s = layers * (operators.forward_s + operators.backward_s)
    assert 0 < step_s - inside_s < (ends + 0.1) * step_s
    longer = replace(config, num_layers=2 * layers)
    more_s = vtrain.iteration_s(longer, operators, vtrain.RINGS, rules) - step_s
    assert more_s == pytest.approx(inside_s + layers * operators.update_s)


def test_a_trace_without_layers_is_refused():
    timeline = mm.read_trace(TRACES / "dlrm-8xv100" / "rank0.json.gz")
    with pytest.raises(ValueError, match=r"attention|backward pass"):
        vtrain.operators_of(timeline, GPT)
