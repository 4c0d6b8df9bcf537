"""What type checkers must accept: the calls of the docs, chained. Nobody runs it."""

from dataclasses import replace

import madmax_lib as mm

model = mm.model("llama3-8b")
cluster = mm.cluster("dgx-h100", nodes=2)
link = mm.Link("100 Gbit/s", 12.5e9)
device: mm.Device = replace(cluster.device, name="mine")
slower = replace(cluster, inter=link, device=device)
mine = mm.Transformer("mine", 12, 768, 12, 3072, 1024, 50257)
plan: mm.Plan = mm.search(model, slower, 512, space=mm.planner.Space.quick()).best
case = mm.Case(mine, slower, plan, global_batch=64)
rate = float(mm.search(mine, slower, 64).table["mfu"].max())
days = float(mm.planner.campaign(model, 1e12, slower, devices=64).best["days"])
timeline: mm.Timeline = mm.simulate(model, slower, plan, global_batch=512)
fit = mm.fit_timeline(timeline, case)
steps = mm.estimate(model, slower, [plan, "dp16.z3"], global_batch=512)
