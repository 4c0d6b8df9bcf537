"""Fail a CI job if training got slower: python examples/gate_in_ci.py BEFORE AFTER;
`madmax compare --gate` in Python.

BEFORE and AFTER: traces of the same training, each a file, a directory or a pattern.
Exit status: 0 passed, 1 slower, 3 cannot tell.
"""

import sys

import madmax_lib as mm
from madmax_lib.traces import gate

SHARE = 0.03  # growth that matters


def main(before: str, after: str) -> int:
    """Print the verdict, and the operations behind it."""
    result = gate(mm.read_trace(before), mm.read_trace(after), SHARE)
    print(result)
    if result.verdict == "fail":
        print(result.explanation.to_string(index=False))
    return {"pass": 0, "fail": 1, "cannot tell": 3}[result.verdict]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
