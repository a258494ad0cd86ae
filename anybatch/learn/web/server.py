"""Serves the practice site on this machine: `anybatch learn --web`."""

import contextlib
import functools
import ipaddress
import pathlib
import secrets
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator

import fastapi
import uvicorn
from nicegui import ui

from anybatch.errors import InputError
from anybatch.learn.catalogue import Course
from anybatch.learn.learner_progress import FOLDER, RECORD, Progress
from anybatch.learn.web import exercise_page, frame, list_page, playground
from anybatch.learn.web.access import Access, check_host, hosts_of
from anybatch.learn.web.workspace import Workspace

LARGEST_MESSAGE = 2**22  # bytes of a request or of a message of a page


def serve(
    course: pathlib.Path | None,
    folder: pathlib.Path | None,
    at: str | None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    opens: bool = True,
    allows_others: bool = False,
) -> bool:
    """Serves the site until Ctrl-C.

    Args:
      course: the folder of a course; None for the one that comes with anybatch.
      folder: the learner's folder; None for the usual one.
      at: the exercise to open; None for the list.
      host: the address to listen on.
      port: the port; 0 for any free one.
      opens: whether to open a browser.
      allows_others: whether `host` may be an address that other machines can reach.

    Raises:
      InputError: if the address cannot be used, or the course or the folder are invalid.
    """
    say = functools.partial(print, flush=True)  # another program may wait for the address
    check_host(host, allows_others=allows_others)
    chosen = Course.builtin() if course is None else Course.read(course)
    if folder is None:
        folder = pathlib.Path(".") if pathlib.Path(RECORD).exists() else FOLDER
    progress = Progress(folder.expanduser(), chosen, say=say)
    progress.prepare()
    path = "/" if at is None else f"/exercise/{chosen.find(at).name}"
    with contextlib.closing(_listening(host, port)) as listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        app = application(Workspace(progress))
        guarded = Access(app, token=token, hosts=hosts_of(host, port), largest=LARGEST_MESSAGE)
        config = uvicorn.Config(
            guarded,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            http="h11",  # it limits the headers of a request
            ws_max_size=LARGEST_MESSAGE,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=1,
        )
        address = f"http://{_shown(host)}:{port}{path}?token={token}"
        say(f"The exercises of {chosen.title!r} are at this address; Ctrl-C ends it.")
        say(address)
        if opens:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    say(f"Your progress is kept. To continue: {progress.command('--web')}")
    return True


def application(workspace: Workspace) -> fastapi.FastAPI:
    """The site, without its access control."""

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        workspace.start()
        yield
        workspace.close()
        await playground.close()

    app = fastapi.FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get(frame.STYLE)
    def style() -> fastapi.Response:
        return fastapi.Response(frame.style(), media_type="text/css", headers={"Cache-Control": "max-age=31536000"})

    _define_pages(workspace)
    look = {"title": "anybatch learn", "favicon": "∇", "dark": None, "language": "en-US", "tailwind": False}
    # A tab that was disconnected for some minutes keeps what was typed in it.
    ui.run_with(app, show_welcome_message=False, reconnect_timeout=600.0, **look)  # type: ignore[arg-type]
    return app


def _define_pages(workspace: Workspace) -> None:
    @ui.page("/")
    def _() -> None:
        list_page.page(workspace)

    @ui.page("/exercise/{name}")
    def _(name: str) -> None:
        try:
            exercise = workspace.course.find(name)
        except InputError as error:
            raise fastapi.HTTPException(404, str(error)) from None
        exercise_page.page(workspace, exercise)

    @ui.page("/playground")
    def _() -> None:
        with frame.frame(workspace, "Playground", "/playground"):
            playground.page()


def _shown(host: str) -> str:
    """A host as it stands in an address; loopback if the site listens on all addresses of this machine."""
    host = host.strip("[]")
    with contextlib.suppress(ValueError):
        given = ipaddress.ip_address(host)
        if given.is_unspecified:
            return "127.0.0.1" if given.version == 4 else "[::1]"
        return f"[{given}]" if given.version == 6 else str(given)
    return host or "127.0.0.1"


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens on an address."""
    host = host.strip("[]")
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)  # a browser that comes before the server is ready has to wait, and is not refused
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise InputError(
            "The address of the site must be free",
            given=f"--host {host} --port {port} ({getattr(error, 'strerror', None) or error})",
            remedy="For any free port: anybatch learn --web --port 0",
        ) from None
    return listener
