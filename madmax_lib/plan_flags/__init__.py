"""Which plan does a framework's configuration state, and how is a plan stated in a
framework's words?

`read(source)` understands torchtitan (JSON dump, command line, log line, TOML),
Megatron-LM (command line, script, YAML of arguments), Megatron-Bridge, DeepSpeed and
Accelerate; `write(plan, framework)` gives such a text. What each key means stands in
`data/plan_flags.csv`.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
