"""What a newcomer gets wrong in the first hour: each ends in one line that names the
thing and the way out.
"""

import inspect
import operator
import re
import warnings
from dataclasses import replace

import pytest

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Device, Transformer

MODEL, CLUSTER, PLAN = "llama3-8b", "dgx-h100", "dp8.z3"


def step(model=MODEL, cluster=CLUSTER, plan=PLAN, **change):
    return mm.estimate(model, cluster, plan, **{"global_batch": 64} | change)


CALLS = {  # words of the answer: the call
    "unknown model 'lama3-8b'; nearest: llama3-8b": lambda: step("lama3-8b"),
    "unknown model 'meta-llama/Llama-9-8B'; nearest: llama3-8b": lambda: step(
        "meta-llama/Llama-9-8B"
    ),
    "nope/config.json: no such file; give a config.json": lambda: step(
        "nope/config.json"
    ),
    "notebooks/config.json: no such file": lambda: mm.model(PROJECT / "notebooks"),
    "unknown cluster 'dgx-h10'; nearest: dgx-h100": lambda: step(cluster="dgx-h10"),
    "unknown cluster 'h1000'; nearest: ": lambda: step(cluster="h1000"),
    "machine.json: no such file; `python -m madmax_lib calibrate`": lambda: mm.cluster(
        "nope/machine.json"
    ),
    "dgx-h100: nodes=2.5 must be a whole number": lambda: mm.cluster(CLUSTER, 2.5),
    "dgx-h100: devices=12 are neither whole nodes of 8": lambda: mm.cluster(
        CLUSTER, devices=12
    ),
    "'fsdp' in plan 'fsdp' is not one of .*; fsdp is dpN.z3": lambda: step(plan="fsdp"),
    "'ddp8' in plan 'ddp8' is not one of .*; ddp is dpN": lambda: step(plan="ddp8"),
    "'selectiv' in plan .* such as selective": lambda: step(plan="dp8.selectiv"),
    "plan={'dp': 8} must be a Plan or its text, such as": lambda: step(plan={"dp": 8}),
    "plan=None must be a Plan or its text": lambda: step(plan=None),
    "16 x 1 x 1 x 1 = 16, but dgx-h100 has 8 devices; give nodes=2": lambda: step(
        plan="dp16"
    ),
    "1 x 7 x 1 x 1 = 7, but dgx-h100 has 8 devices": lambda: step(plan="tp7"),
    "dp is given twice in plan": lambda: step(plan="dp8.dp8"),
    "zero='3' is not one of 0, 1, 2, 3": lambda: mm.Plan(zero="3"),
    "dp=-8 must be a whole number": lambda: mm.Plan(dp=-8),
    "column 'dpp' is not a field of Plan; nearest: ": lambda: step(
        plan=__import__("pandas").DataFrame({"dpp": [8]})
    ),
    "global_batch=0 must be a whole number above zero": lambda: step(global_batch=0),
    "global_batch=7 is not a multiple of dp": lambda: step(global_batch=7),
    "global_batch='64' must be a whole number": lambda: step(global_batch="64"),
    "missing 1 required keyword-only argument: 'global_batch'": lambda: mm.estimate(
        MODEL, CLUSTER, PLAN
    ),
    "sequence='8k' must be a whole number": lambda: step(sequence="8k"),
    "cp=2 does not divide 8001 tokens": lambda: step(plan="dp4.cp2", sequence=8001),
    "dtype='int4' is not one of fp64, fp32": lambda: step(dtype="int4"),
    "a100-80 does not compute in fp8; give dtype='bf16'": lambda: step(
        cluster="dgx-a100", dtype="fp8"
    ),
    "v100-16 does not compute in bf16; give dtype='fp16'": lambda: step(
        cluster="dgx-1-v100"
    ),
    "unknown software 'pytorch2'; nearest: fsdp2": lambda: step(software="pytorch2"),
    "parameters='machine.json' must be a Parameters; mm.machine": lambda: step(
        parameters="machine.json"
    ),
    "recommendation models have no closed form; use simulate": lambda: step(
        "dlrm-a", "zionex", "dp128"
    ),
    "objective='speed' is not one of time, cost": lambda: mm.search(
        MODEL, CLUSTER, 64, objective="speed"
    ),
    "space='quick' must be a Space; such as": lambda: mm.search(
        MODEL, CLUSTER, 64, space="quick"
    ),
    "method='zero3' is not one of ddp": lambda: mm.largest_model(CLUSTER, "zero3"),
    "one of step_s, .* got none": lambda: mm.expect(
        MODEL, CLUSTER, PLAN, global_batch=64
    ),
    "tokens='15T' must be a number": lambda: mm.planner.campaign(
        MODEL, "15T", CLUSTER, days=30
    ),
    "/nope: no such file or directory": lambda: mm.read_trace("/nope"),
    "tests/core: no trace files": lambda: mm.read_trace(PROJECT / "tests" / "core"),
    "source=None must be text or a Path": lambda: mm.read_trace(None),
    "unknown dataset 'vit'; known: .*vit-ddp": lambda: mm.read_trace(mm.dataset("vit")),
    "timeline='DIR' must be a Timeline; mm.read_trace reads one": lambda: mm.breakdown(
        "DIR"
    ),
    "a='A' must be a Timeline; mm.read_trace reads one": lambda: mm.compare("A", "B"),
    "timeline='DIR' .*; mm.read_trace": lambda: mm.plot_timeline("DIR"),
    "timeline=None .*; mm.read_trace": lambda: mm.export_trace(None, "x"),
    "timeline=3 .*; mm.read_trace": lambda: mm.view_timeline(3),
    r"timeline=\[\] .*; mm.read_trace": lambda: mm.traces.advise([]),
    "figure name 'x' is not of the form topic/name": lambda: mm.save_figure(None, "x"),
    "no model 'llama3-8b' to run; nearest: ": lambda: mm.RunSpec(model=MODEL),
    "spec='gpt-tiny' must be a RunSpec; such as": lambda: mm.launch("gpt-tiny", "x"),
    "no calibration here; `python -m madmax_lib calibrate": lambda: mm.machine("/nope"),
    "mine: memory_bytes=80 is in bytes, 1 GB being 1e9": lambda: Device(
        "mine", 80, 864, {"bf16": 362}
    ),
    "mine: hidden=64 is not a multiple of heads=6": lambda: Transformer(
        "mine", layers=2, hidden=64, heads=6, ffn=4
    ),
    "mine: kv_heads=3 does not divide heads=32": lambda: replace(
        mm.model(MODEL), name="mine", kv_heads=3
    ),
}
COMMANDS = {
    "": "arguments are required: command",
    "nothing": "invalid choice: 'nothing'",
    "estimate": "required: model, cluster",
    f"estimate lama3 {CLUSTER} dp8 --global-batch 64": (
        "unknown model 'lama3'; nearest: llama"
    ),
    f"estimate {MODEL} {CLUSTER} dp8/tp2 --global-batch 64": "'dp8/tp2' in plan",
    f"estimate {MODEL} {CLUSTER} dp8 --global-batch x": "invalid int value: 'x'",
    f"search {MODEL} dgx --global-batch 64": "unknown cluster 'dgx'; nearest",
    f"fits {MODEL} {CLUSTER} dp3 --global-batch 64": "but dgx-h100 has 8 devices",
    f"plan --model {MODEL} --tokens 1e9 --days 30 --device h1000": "unknown device 'h1000'; nearest: h100",
    f"plan --model {MODEL} --tokens many --days 30 --device h100": "'many' is no number such as 15e12",
    f"plan --model {MODEL} --tokens 1e9 --device h100": "one of the arguments --days",
    f"expect --model {MODEL} --cluster {CLUSTER} --plan {PLAN} --global-batch 64": "got none",
    "train gpt-tinny dp2": "no model 'gpt-tinny' to run; nearest: gpt-tiny",
    "train gpt-tiny fsdp": "fsdp is dpN.z3",
    "bench --ranks 0": "'0' is not a number of 1 to 1024",
    "breakdown /nope": "/nope: no such file",
    "report": "required: TRACE",
    "report /no/such/run": "/no/such/run: no such file or directory",
    f"report {PROJECT / 'traces'}": "in this directory; its folders gpt",
    f"report {PROJECT / 'traces' / 'vit-ddp'} -o /": "/: is a directory",
    "compare A B": "A: no such file or directory, and no baseline of this name",
    "compare . --gate x": "'x' is not a share such as 3%",
    "stragglers /nope": "/nope: no such file",
    "flight /nope": "/nope: no such directory",
    "mcp /nope": "/nope: no such directory",
    "calibrate --minutes -1": "minutes=-1.0 must be a positive number",
    "run 99_nothing": (
        "no notebook '99_nothing'; nearest: 00_tour, 01_explore; `madmax run --list`"
    ),
    "run 20_overlaps": "no notebook '20_overlaps'; nearest: 20_overlap",
    "run -p quick=True": "-p needs the name of one notebook",
    f"run 20_overlap -o {PROJECT / 'Makefile'}": (
        "Makefile: is a file, give the name of a folder"
    ),
    f"site -o {PROJECT / 'Makefile'}": "Makefile: is a file, give the name of a folder",
}


@pytest.mark.parametrize(
    ("words", "call"), CALLS.items(), ids=[words[:30] for words in CALLS]
)
def test_a_wrong_call_is_answered_in_one_line(words, call):
    with (
        warnings.catch_warnings(),
        pytest.raises((ValueError, OSError, TypeError), match=words) as told,
    ):
        warnings.simplefilter("error")
        call()
    assert (
        isinstance(told.value, (ValueError, OSError)) or "missing" in words
    )  # which Python itself says
    assert "\n" not in str(told.value) and len(str(told.value)) < 330


@pytest.mark.parametrize(
    ("line", "words"), COMMANDS.items(), ids=[line[:30] for line in COMMANDS]
)
def test_a_wrong_command_is_answered_in_one_line_and_status_2(capsys, line, words):
    try:
        status = main(line.split())
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2 and not said.out
    assert (
        said.err.startswith("madmax")
        and words in said.err
        and said.err.count("\n") == 1
        and "Trace" not in said.err
    )


def test_names_are_taken_as_people_type_them():
    """Of models, clusters, plans and dtypes, in every call that takes a step."""
    usual, spelled = (
        (MODEL, CLUSTER, PLAN),
        ("meta-llama/Llama-3.1-8B", "H100", "dp=8, zero=3"),
    )
    for call in (mm.estimate, mm.fits):
        first, second = (
            call(*usual, global_batch=64),
            call(*spelled, global_batch=64, dtype="torch.bfloat16"),
        )
        assert repr(first) == repr(second)
    assert mm.memory(usual[0], usual[2]).equals(
        mm.memory(spelled[0], spelled[2], dtype="bfloat16")
    )
    one, other = (
        mm.simulate("gpt2", "A100", text, global_batch=8)
        for text in ("dp8.z1", "dp8 zero1")
    )
    assert mm.breakdown(one).equals(mm.breakdown(other))


OF_THE_DESIGN = """read_trace breakdown export_trace compare plot_timeline save_figure setup model models cluster
    clusters devices Plan simulate estimate memory fits largest_model search tune RunSpec launch calibrate machine
    expect dataset view_timeline view_in_perfetto Timeline"""


@pytest.mark.parametrize("name", OF_THE_DESIGN.split())
def test_help_names_what_to_look_at_next(name):
    text = inspect.getdoc(getattr(mm, name))
    # the list may go on in the next line
    listed = re.search(r"See\s+also:\s+(.*?)\.$", text, re.MULTILINE | re.DOTALL)[1]
    for other in re.split(r",\s+", listed):
        assert other != f"mm.{name}" and callable(
            operator.attrgetter(other.removeprefix("mm."))(mm)
        ), other
