"""What a newcomer gets wrong in the first hour: each ends in one line that names the
thing and the way out.
"""

import inspect
import operator
import re
import warnings
from dataclasses import replace

import pandas as pd
import pytest
from support import cells

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Device, Transformer

MODEL, CLUSTER, PLAN = "llama3-8b", "dgx-h100", "dp8.z3"


def step(model=MODEL, cluster=CLUSTER, plan=PLAN, **change):
    return mm.estimate(model, cluster, plan, **{"global_batch": 64} | change)


TYPES = {"Device": Device, "Transformer": Transformer, "replace": replace}
NAMES = TYPES | {"mm": mm, "pd": pd, "step": step, "PROJECT": PROJECT}
# an error shows the beginning of a frame, in one line
NAMES["ROWS"] = pd.DataFrame(0, range(200), ["a", "b"])
NAMES |= {"MODEL": MODEL, "CLUSTER": CLUSTER, "PLAN": PLAN}
# A call, and words of its answer.
CALLS = cells(
    """
    step("lama3-8b") | unknown model 'lama3-8b'; nearest: llama3-8b
    step("meta-llama/Llama-9-8B") | unknown model 'meta-llama/Llama-9-8B'; nearest: llama3-8b
    step("nope/config.json") | nope/config.json: no such file & config.json
    mm.model(PROJECT / "notebooks") | notebooks/config.json: no such file
    step(cluster="dgx-h10") | unknown cluster 'dgx-h10'; nearest: dgx-h100
    step(cluster="h1000") | unknown cluster 'h1000'; nearest:
    mm.cluster("nope/machine.json") | machine.json: no such file & `python -m madmax_lib calibrate`
    mm.cluster(CLUSTER, 2.5) | dgx-h100: nodes=2.5 & whole number
    mm.cluster(CLUSTER, devices=12) | dgx-h100: devices=12 & whole nodes of 8
    step(plan="fsdp") | 'fsdp' in plan 'fsdp' & not one of & fsdp is dpN.z3
    step(plan="ddp8") | 'ddp8' in plan 'ddp8' & not one of & ddp is dpN
    step(plan="dp8.selectiv") | 'selectiv' in plan & such as selective
    step(plan={"dp": 8}) | plan={'dp': 8} & a Plan or its text, such as
    step(plan=None) | plan=None & a Plan or its text
    step(plan=" . ") | plan=' . ' & a Plan or its text
    step(plan="dp16") | 16 x 1 x 1 x 1 = 16 & dgx-h100 has 8 devices & nodes=2
    step(plan="tp7") | 1 x 7 x 1 x 1 = 7 & dgx-h100 has 8 devices
    step(plan="dp8.dp8") | dp is given twice in plan
    mm.Plan(zero="3") | zero='3' & not one of 0, 1, 2, 3
    mm.Plan(dp=-8) | dp=-8 & whole number
    step(plan=pd.DataFrame({"dpp": [8]})) | column 'dpp' & not a field of Plan; nearest:
    step(global_batch=0) | global_batch=0 & whole number above zero
    step(global_batch=7) | global_batch=7 & multiple of dp
    step(global_batch="64") | global_batch='64' & whole number
    mm.estimate(MODEL, CLUSTER, PLAN) | missing & keyword-only argument: 'global_batch'
    step(sequence="8k") | sequence='8k' & whole number
    step(plan="dp4.cp2", sequence=8001) | cp=2 does not divide 8001 tokens
    step(dtype="int4") | dtype='int4' & not one of fp64, fp32
    step(cluster="dgx-a100", dtype="fp8") | a100-80 does not compute in fp8 & dtype='bf16'
    step(cluster="dgx-1-v100") | v100-16 does not compute in bf16 & dtype='fp16'
    step(software=2) | software=2 & must be a Software or the name
    step(parameters="machine.json") | parameters='machine.json' & a Parameters & mm.machine
    step("dlrm-a", "zionex", "dp128") | recommendation models & use simulate
    mm.search(MODEL, CLUSTER, 64, objective="speed") | objective='speed' & one of time, cost
    mm.search(MODEL, CLUSTER, 64, space="quick") | space='quick' & a Space; such as
    mm.largest_model(CLUSTER, "zero3") | method='zero3' & not one of ddp
    mm.expect(MODEL, CLUSTER, PLAN, global_batch=64) | one measurement, step_s & got none
    mm.planner.campaign(MODEL, "15T", CLUSTER, days=30) | tokens='15T' & a number
    mm.read_trace("/nope") | /nope: no such file or directory
    mm.read_trace(PROJECT / "tests" / "core") | tests/core: no trace files
    mm.read_trace(None) | source=None & text or a Path
    mm.read_trace(mm.dataset("vit")) | unknown dataset 'vit'; known: & vit-ddp
    mm.breakdown("DIR") | timeline='DIR' & a Timeline & mm.read_trace reads one
    mm.compare("A", "B") | a='A' & a Timeline & mm.read_trace reads one
    mm.plot_timeline("DIR") | timeline='DIR' & ; mm.read_trace
    mm.export_trace(None, "x") | timeline=None & ; mm.read_trace
    mm.view_timeline(3) | timeline=3 & ; mm.read_trace
    mm.traces.advise([]) | timeline=[] & ; mm.read_trace
    mm.breakdown(ROWS) | timeline=a b 0 0 0 & ... & ; mm.read_trace
    mm.RunSpec(ROWS, "dp2") | model=a b 0 0 0 & ...
    mm.calibrate(ROWS) | directory=a b 0 0 0 & ...
    mm.save_figure(None, ROWS) | figure name a b 0 0 0 & ...
    mm.save_figure(None, "x") | figure name 'x' & of the form topic/name
    mm.RunSpec(model=MODEL) | no model 'llama3-8b' to run; nearest:
    mm.launch("gpt-tiny", "x") | spec='gpt-tiny' & a RunSpec; such as
    mm.machine("/nope") | no such file & `python -m madmax_lib calibrate
    Device("mine", 80, 864, {"bf16": 362}) | mine: memory_bytes=80 & in bytes, 1 GB being 1e9
    Device("mine", 80_000, 864e9, {"bf16": 362e12}) | mine: memory_bytes=80000 & in bytes, 1 GB being 1e9
    Device("mine", 80e9, 864e9, {"bf16": 362}) | bf16=362 & FLOP/s, 1 TFLOP/s being 1e12
    mm.Link("net", 400) | net: bandwidth_bytes_per_s=400 & in bytes, 1 GB being 1e9
    mm.Link("net", 50e9, 5) | net: latency_s=5 & in seconds, 1 us being 1e-6
    Transformer("mine", 2, 64, 6, 4) | mine: hidden=64 & multiple of heads=6
    replace(mm.model(MODEL), name="mine", kv_heads=3) | mine: kv_heads=3 & divide heads=32
""",
    literal=False,
)

COMMANDS = cells(
    """
    | arguments are required: command
    nothing | invalid choice: 'nothing'
    estimate | required: model, cluster
    estimate lama3 {CLUSTER} dp8 --global-batch 64 | unknown model 'lama3'; nearest: llama
    estimate {MODEL} {CLUSTER} dp8/tp2 --global-batch 64 | 'dp8/tp2' in plan
    estimate {MODEL} {CLUSTER} job.yaml --global-batch 64 | plan='job.yaml' is a file's name & dp2.tp2.z3
    estimate {MODEL} {CLUSTER} dp1 --global-batch 64 | dgx-h100 has & devices; give --devices 1
    search {MODEL} {CLUSTER} --like none.yaml --global-batch 64 | none.yaml: No such file
    estimate {MODEL} {CLUSTER} dp8 --global-batch x | invalid int value: 'x'
    search {MODEL} dgx --global-batch 64 | unknown cluster 'dgx'; nearest
    fits {MODEL} {CLUSTER} dp3 --global-batch 64 | dgx-h100 has 8 devices
    plan --model {MODEL} --tokens 1e9 --days 30 --device h1000 | unknown device 'h1000'; nearest: h100
    plan --model {MODEL} --tokens many --days 30 --device h100 | 'many' is not a number such as 15e12
    plan --model {MODEL} --tokens 1e9 --device h100 | give --days, --devices or both
    expect --model {MODEL} --cluster {CLUSTER} --plan {PLAN} --global-batch 64 | got none
    train gpt-tinny dp2 | no model 'gpt-tinny' to run; nearest: gpt-tiny
    train gpt-tiny fsdp | fsdp is dpN.z3
    bench --ranks 0 | '0' is not a number of 1 to 1024
    breakdown /nope | /nope: no such file
    report | required: TRACE
    report /no/such/run | /no/such/run: no such file or directory
    report {PROJECT}/traces | in this directory; its folders dlrm
    report {PROJECT}/traces/vit-ddp -o / | /: is a directory
    compare A B | A: no such file or directory, and no baseline of this name
    compare . --gate x | 'x' is not a share such as 3%
    stragglers /nope | /nope: no such file
    flight /nope | /nope: no such directory
    calibrate --ranks -2 | '-2' is not a number of 1 to 1024
    calibrate --rows {PROJECT}/setup.py | setup.py: not a table of runs
    calibrate -o {PROJECT}/setup.py | setup.py' is a file; a folder is needed
    compare A --gate 3% B | A: no such file or directory
    breakdown A --csv --nope B | unrecognized arguments: --nope
    train gpt-tiny --mode hybrid --tp-size 0 --dry-run | '0' is not a number of 1 to 1024
    train gpt-tiny --mode baseline --max-samples -1 --dry-run | --steps -1 must be
    record --warmup -3 {PROJECT}/setup.py | --warmup -3 must be
    record --every -1 {PROJECT}/setup.py | --every -1: a recording
    search gpt2 {CLUSTER} --global-batch 99999999999999999999 | a whole number below 2^62
    expect --model gpt2 --cluster {CLUSTER} --plan dp8 --nodes 3 --global-batch 64 --step-s 1 | devices=8 on 3 nodes
    estimate gpt9 {CLUSTER} dp8 --global-batch 8 | unknown model 'gpt9' & RunSpec(model=...)
    calibrate --minutes -1 | --minutes -1.0 & positive number
    estimate {MODEL} {CLUSTER} dp24 --global-batch 48 | dgx-h100 has 8 devices; give --nodes 3
    plan --model {MODEL} --tokens -15e12 --days 30 --device h100 | -15e12 are less than a million
    compare {PROJECT}/traces/gpt-ddp {PROJECT}/traces/gpt-ddp --gate -3% | '-3%' is not a share such as
    paper vtrain -c nope.json | nope.json: No such file
    run 99_nothing | no notebook '99_nothing'; nearest: 00_tour, 01_explore & `madmax run --list`
    run 20_overlaps | no notebook '20_overlaps'; nearest: 20_overlap
    run -p quick=True | -p needs the name of one notebook
    run 20_overlap -o {PROJECT}/Makefile | Makefile: is a file & name of a folder
    site -o {PROJECT}/Makefile | Makefile: is a file & name of a folder
""",
    literal=False,
)


def missing(words, said):
    return [word for word in words.split(" & ") if word not in said]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[call for call, _ in CALLS])
def test_a_wrong_call_is_answered_in_one_line(call, words):
    own = TypeError if "missing" in words else (ValueError, OSError)
    with warnings.catch_warnings(), pytest.raises(own) as told:
        warnings.simplefilter("error")
        eval(call, NAMES)
    said = str(told.value)
    assert not missing(words, said), said
    assert "\n" not in said and len(said) < 330


@pytest.mark.parametrize(
    ("line", "words"), COMMANDS, ids=[line for line, _ in COMMANDS]
)
def test_a_wrong_command_is_answered_in_one_line_and_status_2(capsys, line, words):
    line = line.format_map(NAMES)
    try:
        status = main(line.split())
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2 and not said.out
    assert said.err.startswith("madmax") and not missing(words, said.err), said.err
    assert said.err.count("\n") == 1 and "Trace" not in said.err


SPELLED = "meta-llama/Llama-3.1-8B", "H100", "dp=8, zero=3"


@pytest.mark.parametrize("call", [mm.estimate, mm.fits])
def test_names_are_taken_as_people_type_them(call):
    """Of models, clusters, plans and dtypes, in every call that takes a step."""
    first = call(MODEL, CLUSTER, PLAN, global_batch=64)
    second = call(*SPELLED, global_batch=64, dtype="torch.bfloat16")
    assert repr(first) == repr(second)


def test_names_are_taken_by_memory_and_simulate_too():
    model, _, plan = SPELLED
    assert mm.memory(MODEL, PLAN).equals(mm.memory(model, plan, dtype="bfloat16"))
    one, other = (
        mm.simulate("gpt2", "A100", text, global_batch=8)
        for text in ("dp8.z1", "dp8 zero1")
    )
    assert mm.breakdown(one).equals(mm.breakdown(other))


OF_THE_DESIGN = """read_trace breakdown export_trace compare plot_timeline save_figure setup model models cluster
    clusters devices Plan simulate estimate memory fits largest_model search tune RunSpec launch calibrate machine
    expect dataset view_timeline Timeline"""


@pytest.mark.parametrize("name", OF_THE_DESIGN.split())
def test_help_names_what_to_look_at_next(name):
    text = inspect.getdoc(getattr(mm, name))
    # the list may go on in the next line
    listed = re.search(r"See\s+also:\s+(.*?)\.$", text, re.MULTILINE | re.DOTALL)[1]
    for other in re.split(r",\s+", listed):
        path = other.removeprefix("mm.")
        assert path != name and callable(operator.attrgetter(path)(mm)), other
