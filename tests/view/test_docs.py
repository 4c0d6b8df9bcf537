"""README and docs/: links resolve, commands parse, a `$ command` prints what is shown,
examples run.

A `console` block is run and compared, numbers to 2 %, `...` for what is left out; an
`sh` block is parsed; a `python` block is run, a `py` block compiled.
`python tests/view/test_docs.py` writes the outputs anew.
"""

import contextlib
import io
import itertools
import json
import re
import shlex
import warnings

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from madmax_lib import __main__, catalog
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.papers.studies import hybrid
from madmax_lib.simulator.rates.parameters import shipped

PAGES = {
    path.stem: path
    for path in [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("[a-z]*.md"))]
}
INDEX = PROJECT / "docs" / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def blocks(path, language):
    return [code for name, code in BLOCK.findall(path.read_text()) if name == language]


def having(language):
    return [name for name, path in PAGES.items() if blocks(path, language)]


def examples(path):
    """(command, lines of its output) of the console blocks."""
    for block in blocks(path, "console"):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, shown = part.partition("\n")
            yield command, shown.splitlines()


def prints(command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        __main__.main(shlex.split(command)[1:])
    return out.getvalue().splitlines()


def alike(shown, line):
    """Whether the words of a shown line begin, or are, those of a printed one; numbers
    to 2 %.
    """
    shown, line = shown.split(), line.split()
    if shown[-1:] == ["..."]:
        shown, line = shown[:-1], line[: len(shown) - 1]
    return len(shown) == len(line) and all(map(same, shown, line))


def same(shown, word):
    try:
        return float(shown.replace(",", "")) == pytest.approx(
            float(word.replace(",", "")), rel=0.02, abs=1e-6
        )
    except ValueError:
        return shown == word


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty working folder in which `traces/` is there, as in a clone."""
    (tmp_path / "traces").symlink_to(PROJECT / "traces")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", having("console"))
def test_commands_print_what_is_shown(project, name):
    for command, shown in examples(PAGES[name]):
        printed = prints(command)
        if shown[-1:] == ["..."]:
            shown, printed = shown[:-1], printed[: len(shown) - 1]
        assert len(shown) == len(printed) and all(map(alike, shown, printed)), (
            f"{command}\n" + "\n".join(printed)
        )


SHAPES = re.findall(
    r"^\| [^|]+ \| `(madmax [^|]+)` \| ([^|]+) \| ([^|]+) \|$",
    PAGES["what-can-a-coding-agent-ask"].read_text(),
    re.M,
)


@pytest.mark.parametrize(("command", "summary", "rows"), SHAPES)
def test_the_keys_an_agent_is_told_of_are_there(project, command, summary, rows):
    answer = json.loads(prints(f"{command} --json")[0])
    assert answer["status"] < 2 and len(SHAPES) == 6
    for keys, part in ((summary, answer["summary"]), (rows, answer["rows"][0])):
        assert set(re.findall(r"`(\w+)`", keys)) <= set(part)
    findings = answer["result"].get("findings", [])
    keys = ["rank", "host", "phase", "since_step", "cost_share", "kind"]
    assert all(list(one) == keys for one in findings)


@pytest.mark.parametrize("name", [*having("sh"), *having("yaml")])
def test_commands_parse(name):
    lines = "".join(
        blocks(PAGES[name], "sh") + blocks(PAGES[name], "yaml")
    ).splitlines()
    commands = [
        line[line.index("madmax ") :]
        for line in lines
        if re.match(r"(- run: )?madmax ", line)
    ]
    for command in commands:
        words = list(
            itertools.takewhile(
                lambda word: word != ">>", shlex.split(command, comments=True)
            )
        )[1:]
        assert __main__._parser(words[:1]).parse_args(words).command


# a page that asks for another network says so
@pytest.mark.filterwarnings("ignore:collectives were measured on links:UserWarning")
@pytest.mark.parametrize("name", [*having("python"), *having("py")])
def test_examples_run(project, name):
    namespace = {}
    with plt.rc_context():  # mm.setup() in a page is not for the tests that follow
        for code in blocks(PAGES[name], "python"):
            exec(compile(code, name, "exec"), namespace)
    plt.close("all")
    for code in blocks(PAGES[name], "py"):
        compile(code, name, "exec")
        import madmax_lib as mm

        assert all(hasattr(mm, call) for call in re.findall(r"\bmm\.(\w+)", code))


@pytest.mark.parametrize(
    "path",
    [*PAGES.values(), INDEX],
    ids=lambda path: path.parent.name + "/" + path.stem,
)
def test_links_lead_somewhere(path):
    """Pictures of a notebook with the table they show beside them."""
    for link in re.findall(r"\]\(([^):]+)\)", path.read_text()):
        target = path.parent / link
        assert target.exists() and (
            target.suffix != ".svg" or target.with_suffix(".csv").exists()
        ), link


def test_a_page_is_a_question_that_the_index_asks():
    index = INDEX.read_text()
    for name, path in PAGES.items():
        if path.parent == INDEX.parent:
            title = path.read_text().partition("\n")[0].removeprefix("# ")
            assert (
                title.rstrip(". ").endswith("?") and f"- [{title}]({name}.md)" in index
            )


def test_the_readme_is_short_and_its_tables_are_those_of_the_pages():
    readme = PAGES["README"].read_text()
    assert len(readme.split()) <= 1400 and len(readme.splitlines()) <= 150
    pages = [path.read_text() for path in PAGES.values() if path != PAGES["README"]]
    rows = [
        line.removesuffix(" |")
        for line in readme.splitlines()
        if re.match(r"\| [^|]+ \| .*\d", line)
    ]
    sure, accurate = (
        readme.partition("## How sure is it?")[2],
        PAGES["how-accurate-is-it"].read_text(),
    )
    assert {f"{share} %" for share in re.findall(r"(\d+(?:\.\d+)?) %", sure)} <= set(
        re.findall(r"[\d.]+ %", accurate)
    )
    assert rows and not [
        row
        for row in rows
        if not any(row in re.sub(r" \(\*.*?\*\)", "", page) for page in pages)
    ]


def of_figure(name, value):
    """Numbers of the table beside a committed figure."""
    return lambda: value(pd.read_csv(PROJECT / "figures" / f"{name}.csv"))


def of_benchmarks(pattern):
    """Numbers in the results of the benchmarks."""
    return lambda: re.search(
        pattern, (PROJECT / "benchmarks" / "README.md").read_text()
    ).groups()


def error(table):
    return 100 * (table["predicted_s"] / table["measured_s"] - 1).abs().mean()


def kinds_read(rows):
    """Kinds of Hugging Face's configurations that such rows of ours name."""
    table = catalog.table("hugging_face")
    return set(" ".join(table.query(rows)["model_type"]).split())


NUMBERS = [
    (
        "The {} constants of the simulator were fitted to {:,} published runs",
        lambda: (len(shipped().fitted), shipped().provenance["rows"]),
    ),
    ("Against {} measured facts", lambda: [len(catalog.table("overlap"))]),
    (
        "a Hugging Face configuration of {} kinds",
        lambda: [len(kinds_read("field != 'refused'") - {"llama-shaped"})],
    ),
    (
        "{} measured steps of 12 V100 and 4 T4 to {:.0f} % on average",
        of_figure("hetero/measured", lambda table: (len(table), error(table))),
    ),
    (
        "six MFU figures come out to {:.2f} points",
        lambda: [
            100 * hybrid.audit().eval("mfu_reported - mfu_reproduced").abs().max()
        ],
    ),
    (
        "Simulated ZeRO-3 hides more communication ({:.0f} %)",
        of_figure(
            "vit_study/overlap",
            lambda table: [100 * table.set_index("strategy")["overlap"]["zero3"]],
        ),
    ),
    ("(worst replay {})", of_benchmarks(r"worst single replay took (\d+) trials")),
    (
        "it takes {} trials on average to be within 5 % of the best (worst",
        of_benchmarks(r"\| mean \|[ |]*\| ([\d.]+) \|"),
    ),
    (
        "The simulator's order takes {} (",
        of_benchmarks(r"\| mean \|[ |]*\| [\d.]+ \| ([\d.]+) \|"),
    ),
    (
        "{} runs of models and layouts that its fit had not seen were off by {} to "
        "{} % in the median",
        lambda: (
            *of_benchmarks(r"Of the (\d+) runs of two ranks")(),
            *of_benchmarks(r"\| 100 \| 2 \| 24 \| ([\d.]+) /")(),
            *of_benchmarks(r"\| 1000 \| 2 \| 24 \| ([\d.]+) /")(),
        ),
    ),
    (
        "{} % of them lay inside their 90 % interval",
        of_benchmarks(r"runs of two ranks (\d+) % lie inside"),
    ),
    (
        "of that machine the median was {} %, the worst {} %",
        of_benchmarks(r"\| 300 \| 4 \| 23 \| ([\d.]+) / (\d+)"),
    ),
    (
        "{} % of unchanged windows of a log of two T4s raised an alarm, and {} % of "
        "3 % slow-downs were found",
        of_benchmarks(
            r"\| log of two T4 \| \d+ of \d+ \((\d+) %\) \| \d+ of \d+ \((\d+) %\)"
        ),
    ),
    (
        "None of {} unchanged pairs of single recordings",
        of_benchmarks(r"\| 2 cores, one recording a side \| 0 of (\d+) "),
    ),
]


@pytest.mark.parametrize(
    ("sentence", "numbers"), NUMBERS, ids=[sentence for sentence, _ in NUMBERS]
)
def test_numbers_in_sentences_are_those_of_their_source(sentence, numbers):
    """Figures, tables of the package and results of the benchmarks; others are checked
    where they are measured.
    """
    pages = " ".join(" ".join(page.read_text().split()) for page in PAGES.values())
    assert sentence.format(*numbers()) in pages


def anew(path):
    """The page with the present outputs of its commands, in the length that is shown."""
    text = path.read_text()
    for command, shown in examples(path):
        lines = [line.rstrip() for line in prints(command)]
        if shown[-1:] == ["..."]:
            lines = [*lines[: len(shown) - 1], "..."]
        cut = [len(old.split()) - 1 if old.endswith(" ...") else None for old in shown]
        cut += [None] * (len(lines) - len(cut))
        lines = [
            line if n is None else re.match(rf"(\S+\s+){{{n}}}", line)[0] + "..."
            for line, n in zip(lines, cut, strict=False)
        ]
        old, new = ("\n".join([command, *part, ""]) for part in (shown, lines))
        text = text.replace("$ " + old, "$ " + new)
    return text


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for page in PAGES.values():
        page.write_text(anew(page))


@pytest.mark.parametrize("words", ["", "--like megatron-core"])
@pytest.mark.filterwarnings("ignore:software 'internevo'")
def test_the_rows_of_the_page_calibrate(words, tmp_path, capsys):
    """Its CSV from the shell, to a machine whose software needs no name, and a page."""
    (text,) = blocks(PAGES["how-do-i-calibrate"], "csv")
    (tmp_path / "my_runs.csv").write_text(text)
    command = [
        "calibrate",
        "--rows",
        f"{tmp_path}/my_runs.csv",
        "-o",
        f"{tmp_path}/mine",
    ]
    assert __main__.main([*command, *words.split()]) == 0
    rows = pd.read_csv(tmp_path / "my_runs.csv")
    errors = pd.read_csv(tmp_path / "mine" / "results.csv")["error"]
    assert len(errors) == len(rows) and errors.abs().max() < 0.15
    assert "predicted / measured" in (tmp_path / "mine" / "page.html").read_text()
    capsys.readouterr()
    asked = ["llama2-7b", f"{tmp_path}/mine/machine.json", "dp32.z1"]
    assert __main__.main(["estimate", *asked, "--global-batch", "512", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    timed_as = words.removeprefix("--like ") or "stranger"
    assert answer["summary"]["software"] == f"internevo, timed as {timed_as}"
    assert abs(answer["rows"][0]["step_s"] / 16.4 - 1) < 0.05
