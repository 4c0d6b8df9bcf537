"""The MCP server over its own protocol, in a process of its own: tools, answers, and
what it may not read.
"""

import json
import sys

import pytest
from support import dataset_or_skip

pytest.importorskip("mcp", reason="the extra mcp is not installed")


def ask(folder, *calls):
    """Names of the tools, and (is_error, text) of each call (tool, arguments)."""
    import anyio
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def talk():
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "madmax_lib", "mcp", str(folder)]
        )
        async with (
            stdio_client(command) as (read, write),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            tools = [tool.name for tool in (await session.list_tools()).tools]
            results = [
                await session.call_tool(name, arguments) for name, arguments in calls
            ]
            return tools, [
                (result.is_error, result.content[0].text) for result in results
            ]

    return anyio.run(talk)


def test_an_agent_asks_over_standard_input_and_output(tmp_path):
    traces = dataset_or_skip("gpt-ddp")
    step = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "plans": ["dp8.z3"],
        "global_batch": 64,
    }
    tools, answers = ask(
        traces.parent,
        ("breakdown", {"traces": [traces.name]}),
        ("estimate", step),
        ("estimate", step | {"plans": ["dp3"]}),
        ("breakdown", {"traces": ["/etc/passwd"]}),
        (
            "fits",
            {
                "model": "/etc/hosts.json",
                "cluster": "dgx-h100",
                "plan": "dp8",
                "global_batch": 8,
            },
        ),
    )
    assert {
        "breakdown",
        "compare",
        "stragglers",
        "flight",
        "estimate",
        "fits",
        "search",
    } <= set(tools)
    breakdown, estimate, illegal = (json.loads(text) for _, text in answers[:3])
    assert (
        len(breakdown["rows"]) == breakdown["summary"]["ranks"]
        and len(breakdown["inputs"][0]["sha256"]) == 64
    )
    assert (
        estimate["rows"][0]["low_s"]
        < estimate["rows"][0]["step_s"]
        < estimate["rows"][0]["high_s"]
    )
    assert illegal["status"] == 2 and illegal["error"]
    assert all(error and "outside of" in text for error, text in answers[3:])


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    from madmax_lib.view.commands.mcp_server import server

    with pytest.raises(FileNotFoundError, match="no such directory"):
        server([tmp_path / "nowhere"], print)
