"""Access control of the practice site: only the learner's own browser reaches it.

The site runs code on the learner's machine, so every other web page and every other user must be kept out. `Access` is
an ASGI middleware around the complete site, and checks each request and each WebSocket handshake, in this order:

1. The headers must be well-formed, and the address short.
2. `Host` must be one of the site's own. A page of another site that has its name resolved to this machine (DNS
   rebinding) still sends its own name here.
3. `Origin` must be this very site where it is sent, and it must be sent by WebSocket handshakes and by every method but
   GET and HEAD. `Origin: null`, which a sandboxed frame sends, is refused.
4. `Sec-Fetch-Site`, where a browser sends it, must not name another site. Another port of this machine is another site
   here: for a browser it is `same-site`, so its requests would carry the cookie.
5. The cookie must be there. It is given in exchange for the token, which is in the address that the terminal prints.

**From the token to the cookie.** The cookie is `SameSite=Strict`: a browser sends it only with requests that start at
this site or at the user. An address that is typed, or opened from a terminal, starts at the user (`Sec-Fetch-Site:
none`), so a redirect that sets the cookie and drops the token from the address works. A link in a web mail starts at
another site, and so does every redirect that follows it: the cookie would be set but not sent. Such a navigation
gets a page that leads on instead, and what follows starts at this site. Whoever sends the token knows it, so this is
no weaker.

**What the cookie cannot do.** Browsers send a cookie to every port of a host. A server of another user on this machine
that the learner visits under the same host name receives it, and `Path` or the port in its name do not prevent this.
"""

import base64
import hashlib
import html
import ipaddress
import re
import secrets
import socket
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from anybatch.errors import InputError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LONGEST_ADDRESS = 2**13  # bytes of the path and the query
LONGEST_HEADERS = 2**16  # bytes of all names and values
SHORTEST_TOKEN = 16  # characters
_TOO_LARGE = 1009  # the code that closes a WebSocket after a message that is too large
_ONCE = (b"host", b"origin", b"cookie", b"content-length", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")
_PRINTABLE = re.compile(rb"[\t\x20-\x7e]*")
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

# Headers of a request that the site must not see. It would believe what proxies say, and there is none. A compressed
# page could not be read here, and compressing saves no time on one machine.
_DROPPED = (b"accept-encoding", b"forwarded", b"x-forwarded-", b"x-real-ip")

# NiceGUI's own inline scripts are allowed by their hashes. Two kinds are recognised by their text, which can do no harm
# wherever it is from: the one that loads Vue, and those that add a style (`ui.add_css`). The others are recognised by
# their place in NiceGUI's template, at its beginning and at its end. Nothing that a learner or a course wrote can come
# before or after them: titles are escaped, and the elements of the page are inside the last script, with every "<"
# escaped. A script that got into the page in any other way does not run.
_FIRST_SCRIPTS = re.compile(rb'<script type="importmap">(.*?)</script>\s*<script>(.*?)</script>', re.DOTALL)
_LAST_SCRIPT = re.compile(rb'.*<script type="module">(.*)</script>\s*</body>\s*</html>\s*', re.DOTALL)
_VUE_SCRIPT = re.compile(
    rb'<script type="module">(\s*import \* as Vue from "vue";\s*globalThis\.Vue = Vue;'
    rb'\s*document\.getElementById\("esm-fallback"\)\?\.remove\(\);\s*)</script>'
)
_STYLE_SCRIPT = re.compile(rb'<script>(addStyle\("(?:[^"\\<\n]|\\[^\n])*"\);)</script>')

_STYLE = (
    ":root { color-scheme: light dark } "
    "body { font: 1.1rem/1.6 system-ui, sans-serif; max-width: 36rem; margin: 15vh auto; padding: 0 1.5rem }"
)


class _Refused(Exception):
    """A request that is not answered by the site.

    Args:
      status: the status of the response.
      title: what is wrong, in a few words.
      words: what must hold, and what to do.
    """

    def __init__(self, status: int, title: str, words: str) -> None:
        self.status, self.title, self.words = status, title, words
        super().__init__(title)


class Access:
    """An ASGI middleware that lets only the learner's own browser reach a site.

    Every response gets the headers that keep other pages from framing, reading or guessing it, and the pages of NiceGUI
    get a Content-Security-Policy that allows NiceGUI's own scripts and nothing from other hosts.

    Args:
      app: the complete site.
      token: the secret in the printed address, at least 16 characters. `secrets.token_urlsafe(32)` makes a good one.
      hosts: the values of `Host` that are accepted, such as "127.0.0.1:8000", from `hosts_of`. All have the same port.
      largest: the number of bytes of the largest body and of the largest WebSocket message.

    Raises:
      InputError: if the token is too short, or there are no hosts.
    """

    def __init__(self, app: App, *, token: str, hosts: frozenset[str], largest: int = 2**20) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise InputError(
                f"The token must have at least {SHORTEST_TOKEN} characters",
                given=f"one of {len(token)}",
                remedy="Pass token=secrets.token_urlsafe(32).",
            )
        if not hosts:
            raise InputError(
                "The site must have a host", given="hosts=frozenset()", remedy="Pass hosts=hosts_of(host, port)."
            )
        self.app = app  # NiceGUI looks for the server of its app through this name
        self._token = token.encode()
        self._hosts = {host.encode() for host in hosts}
        self._largest = largest
        # The port is in the name, since a browser has the same cookies for all ports of a host.
        port = next(iter(hosts)).rpartition(":")[2]
        self._cookie_name = f"anybatch_learn_{port if port.isdigit() else 80}".encode()
        self._cookie = secrets.token_urlsafe(32).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = self._checked(scope)
            if scope["method"] not in ("GET", "HEAD"):
                _need_origin(headers)
            entering = _names_token(scope)
            if not _from_here(headers) and not (entering and _is_navigation(scope, headers) and self._knows(scope)):
                raise _Refused(
                    403,
                    "Opened from another site",
                    "Another site cannot use the exercises, but you can open them here.",
                )
            if entering and (self._knows(scope) or self._has_cookie(headers)):
                await self._enter(scope, headers, send)
                return
            self._need_cookie(headers)
            body = await self._body(headers, receive)
        except _Refused as refused:
            await _respond(send, refused.status, _page(refused.title, refused.words))
            return
        if body is None:
            return
        replayed = _Replayed(body, receive)
        try:
            await self.app(_cleaned(scope), replayed, _Secured(send, headers[b"host"]))
        except RuntimeError:
            # NiceGUI's middlewares complain about a missing response whenever a browser leaves a page that still loads.
            if not replayed.gone:
                raise

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = self._checked(scope)
            # The address of a WebSocket has another scheme than its page, and browsers differ in whether they call that
            # another site. `Origin` is exact, and always sent.
            _need_origin(headers)
            self._need_cookie(headers)
        except _Refused:
            await send({"type": "websocket.close", "code": 1008, "reason": ""})  # before it is accepted: status 403
            return
        limited = _Limited(receive, send, self._largest)
        await self.app(_cleaned(scope), limited.receive, limited.send)

    def _checked(self, scope: Scope) -> dict[bytes, bytes]:
        """The headers that are used here, once they and the address are known to be in order."""
        raw_path: bytes = scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()
        query: bytes = scope.get("query_string") or b""
        if len(raw_path) + len(query) > LONGEST_ADDRESS:
            raise _Refused(414, "Address too long", f"An address has at most {LONGEST_ADDRESS} bytes.")
        if not scope["path"].isprintable() or not _PRINTABLE.fullmatch(raw_path) or not _PRINTABLE.fullmatch(query):
            raise _Refused(400, "Malformed address", "An address has no control characters, and is percent-encoded.")
        headers = _well_formed(scope["headers"])
        if headers.get(b"host") not in self._hosts:
            words = "Open the address that the terminal printed. Through ssh -L, use the same port on both sides."
            raise _Refused(421 if b"host" in headers else 400, "Not the address of this site", words)
        if headers.get(b"origin", own := b"http://" + headers[b"host"]) != own:
            raise _Refused(403, "Another site", "Only pages of this site can send requests to it.")
        return headers

    def _knows(self, scope: Scope) -> bool:
        """True if the address has the token, once."""
        given = _tokens(scope)
        return len(given) == 1 and secrets.compare_digest(given[0].encode(), self._token)

    def _has_cookie(self, headers: dict[bytes, bytes]) -> bool:
        pairs = [pair.strip().partition(b"=") for pair in headers.get(b"cookie", b"").split(b";")]
        given = [value for name, _, value in pairs if name == self._cookie_name]
        if len(given) > 1:
            name = self._cookie_name.decode()
            raise _Refused(400, "Two cookies", f"There must be one cookie {name}. Delete the cookies of this site.")
        return len(given) == 1 and secrets.compare_digest(given[0], self._cookie)

    def _need_cookie(self, headers: dict[bytes, bytes]) -> None:
        if not self._has_cookie(headers):
            words = (
                "The exercises run code on this machine, so they open with a secret address only. "
                "Look at the terminal where anybatch learn --web runs: it printed the address, with the token. "
                "If you have opened that address in this browser already, go on here."
            )
            raise _Refused(401, "Open the address with the token", words)

    async def _enter(self, scope: Scope, headers: dict[bytes, bytes], send: Send) -> None:
        """Gives the cookie, and leads to the same path without the token."""
        raw_path = scope.get("raw_path") or b"/"
        # A path that begins with two slashes would lead to another host.
        to = raw_path.decode("ascii") if re.fullmatch(rb"/(?!/)[\w/.~%-]*", raw_path) else "/"
        more: Headers = []
        if self._knows(scope):
            cookie = self._cookie_name + b"=" + self._cookie + b"; HttpOnly; SameSite=Strict; Path=/"
            more.append((b"set-cookie", cookie))
        if _from_here(headers):
            await _respond(send, 303, b"", [*more, (b"location", to.encode())])
        else:
            await _respond(send, 200, _page("The exercises", "They open in a moment.", to=to, at_once=True), more)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body of a request; None if the browser went away."""
        length = headers.get(b"content-length", b"0")
        if not re.fullmatch(rb"[0-9]{1,18}", length):
            raise _Refused(400, "Malformed header", "Content-Length must be a number.")
        too_large = _Refused(413, "Too large", f"A request has at most {self._largest} bytes.")
        if int(length) > self._largest:
            raise too_large
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body") or b""
            if len(body) > self._largest:
                raise too_large
            more = message.get("more_body", False)
        return bytes(body)


class _Limited:
    """The two ends of a WebSocket, which is closed after a message that is too large."""

    def __init__(self, receive: Receive, send: Send, largest: int) -> None:
        self._receive, self._send, self._largest = receive, send, largest
        self._closed = False

    async def receive(self) -> Message:
        message = {"type": "websocket.disconnect", "code": _TOO_LARGE} if self._closed else await self._receive()
        if message["type"] != "websocket.receive" or self._fits(message):
            return message
        self._closed = True  # before anything is awaited: other tasks of the site may be sending
        await self._send({"type": "websocket.close", "code": _TOO_LARGE, "reason": "message too large"})
        return {"type": "websocket.disconnect", "code": _TOO_LARGE}

    async def send(self, message: Message) -> None:
        if not self._closed:
            await self._send(message)

    def _fits(self, message: Message) -> bool:
        text, data = message.get("text") or "", message.get("bytes") or b""
        # A character has up to four bytes; most messages are so short that they need not be counted.
        size = len(data) + 4 * len(text)
        return size <= self._largest or len(data) + len(text.encode("utf-8", "surrogatepass")) <= self._largest


class _Replayed:
    """Receives a body that was read already, and then what comes after it. `gone` is True once the browser left."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._receive = receive
        self.gone = False

    async def __call__(self) -> Message:
        message = self._first.pop() if self._first else await self._receive()
        self.gone |= message["type"] == "http.disconnect"
        return message


class _Secured:
    """Sends a response of the site with the headers of `_protection`.

    A page of NiceGUI is held back until it is complete, since the policy in its header has the hashes of its scripts.
    """

    def __init__(self, send: Send, host: bytes) -> None:
        self._send, self._host = send, host
        self._held: Message | None = None
        self._page = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            if headers.get(b"x-nicegui-content") == b"page" and _is_html(headers):
                self._held = message
            else:
                await self._send(_protected(message, _nothing()))
        elif self._held is not None and message["type"] == "http.response.body":
            self._page += message.get("body") or b""
            if not message.get("more_body", False):
                start, self._held = self._held, None
                await self._send(_protected(start, _policy(bytes(self._page), self._host)))
                await self._send({"type": "http.response.body", "body": bytes(self._page)})
        else:
            await self._send(message)


def hosts_of(host: str, port: int) -> frozenset[str]:
    """The values of `Host` that browsers send to a site.

    On loopback these are the address itself and "localhost". An address that listens everywhere ("0.0.0.0", "::") has
    many names, and not all are known here: it answers to the loopback names, to the name of the machine and to the
    addresses of that name. To be reached under another one, the site must be started with that one as its host.

    Args:
      host: the address or the name that the site listens on.
      port: its port.

    >>> sorted(hosts_of("127.0.0.1", 8000))
    ['127.0.0.1:8000', 'localhost:8000']
    >>> sorted(hosts_of("192.168.1.5", 8000))
    ['192.168.1.5:8000']
    """
    address = _address(host)
    if address is None:
        name = host.lower()
        names = {*_LOOPBACK_NAMES} if name == "localhost" else {name}
    elif address.is_unspecified:
        machine = socket.gethostname().lower()
        names = {*_LOOPBACK_NAMES, machine, *(_shown(each) for each in _resolved(machine))}
    else:
        names = {_shown(address), "localhost"} if str(address) in ("127.0.0.1", "::1") else {_shown(address)}
    # Browsers leave out the port that is usual for HTTP.
    return frozenset(f"{name}:{port}" for name in names) | (frozenset(names) if port == 80 else frozenset())


def check_host(host: str, *, allows_others: bool) -> None:
    """Checks that a site listens on this machine only, or that more is allowed.

    Loopback is an address of 127.0.0.0/8, "::1", or "localhost" if it stands for such addresses only. Another name is
    not loopback even if it stands for such an address now: whoever owns the name could have it lead elsewhere.

    Args:
      host: the address or the name to listen on, without a port.
      allows_others: whether other machines may reach it.

    Raises:
      InputError: if it is not a host, or is beyond loopback and that is not allowed.
    """
    address = _address(host)
    if address is None and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise InputError(
            "The host must be a name or an address, without a port",
            given=repr(host),
            remedy="For this machine only: anybatch learn --web --host 127.0.0.1 --port 8000",
        )
    if allows_others:
        return
    addresses = [address] if address else _resolved(host) if host.lower() == "localhost" else []
    if not addresses or not all(each.is_loopback for each in addresses):
        raise InputError(
            "The site must be reachable from this machine only, unless you allow more",
            given=f"the host {host!r}, which is not a loopback address",
            remedy=(
                "Everybody who can reach this address and has the token can run code as you on this machine. The "
                "traffic is not encrypted, so others on the network can read the token.\n"
                "The safe way from another machine is to leave out --host here, and to run there\n"
                "    ssh -L 8000:127.0.0.1:8000 user@host\n"
                "with the --port of the site in both places. To allow it nevertheless: --let-others-run-code"
            ),
        )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, with IPv4 taken out of IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]") if host else "::")
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _resolved(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a name; none if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [address for *_, entry in found if (address := _address(str(entry[0]))) is not None]


def _shown(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """An address as browsers write it in front of a port."""
    return f"[{address}]" if address.version == 6 else str(address)


def _well_formed(given: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by their names in small letters, with the first value of each."""
    headers: dict[bytes, bytes] = {}
    size = 0
    for name, value in given:
        name, size = name.lower(), size + len(name) + len(value)
        if size > LONGEST_HEADERS:
            raise _Refused(431, "Headers too long", f"The headers have at most {LONGEST_HEADERS} bytes.")
        if not _PRINTABLE.fullmatch(name) or not _PRINTABLE.fullmatch(value):
            shown = name.decode("ascii", "replace")
            raise _Refused(400, "Malformed header", f"{shown} must have printable ASCII characters only.")
        if name in headers and name in _ONCE:
            raise _Refused(400, "Malformed header", f"{name.decode()} must be sent once.")
        headers.setdefault(name, value)
    return headers


def _from_here(headers: dict[bytes, bytes]) -> bool:
    """True if a request starts at this site or at the user, as far as the browser says."""
    return headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")


def _is_navigation(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """True if a request opens a page in a tab."""
    kind = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return scope["method"] == "GET" and kind == (b"navigate", b"document")


def _need_origin(headers: dict[bytes, bytes]) -> None:
    if b"origin" not in headers:
        raise _Refused(403, "Another site", "Requests that change something must have an Origin.")


def _names_token(scope: Scope) -> bool:
    """True if a request brings a token, right or wrong."""
    return scope["method"] == "GET" and bool(_tokens(scope))


def _tokens(scope: Scope) -> list[str]:
    query = (scope.get("query_string") or b"").decode("ascii")
    return [value for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True) if name == "token"]


def _cleaned(scope: Scope) -> Scope:
    """What the site sees of a request."""
    headers = [(name, value) for name, value in scope["headers"] if not name.lower().startswith(_DROPPED)]
    return {**scope, "headers": headers}


def _is_html(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").lower().startswith((b"text/html", b"application/xhtml"))


def _protection(policy: str) -> dict[bytes, bytes]:
    """The headers of every response."""
    return {
        b"content-security-policy": policy.encode("ascii"),
        b"x-content-type-options": b"nosniff",
        b"x-frame-options": b"DENY",
        b"referrer-policy": b"no-referrer",
        b"cross-origin-opener-policy": b"same-origin",
        b"cross-origin-resource-policy": b"same-origin",
    }


def _protected(start: Message, policy: str) -> Message:
    """The start of a response with the headers of `_protection`, in place of its own."""
    added = _protection(policy)
    headers = [(name.lower(), value) for name, value in start.get("headers", ())]
    if _is_html(dict(headers)):
        added[b"cache-control"] = b"no-store"
    kept = [(name, value) for name, value in headers if name not in added]
    return {**start, "headers": [*kept, *added.items()]}


def _hash(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def _nothing() -> str:
    """The policy of everything but pages: it loads and runs nothing."""
    return "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _policy(page: bytes, host: bytes) -> str:
    """The policy of a page of NiceGUI.

    NiceGUI evaluates strings from the server, and Vue compiles templates, hence 'unsafe-eval'. Both set styles in the
    page, and so does the code editor, hence 'unsafe-inline' for styles. Quasar's styles and the icon of the site have
    images in them, hence data: for images.
    """
    by_place = [_FIRST_SCRIPTS.search(page), _LAST_SCRIPT.fullmatch(page)]
    scripts = [text for found in by_place if found for text in found.groups()]
    scripts += [*_VUE_SCRIPT.findall(page), *_STYLE_SCRIPT.findall(page)]
    name = host.decode("ascii")
    # 'self' is meant to cover the WebSocket, but not all browsers agree. A policy cannot name an address of IPv6.
    socket_source = "" if name.startswith("[") else f" ws://{name}"
    return "; ".join(
        [
            "default-src 'none'",
            " ".join(["script-src 'self' 'unsafe-eval'", *dict.fromkeys(map(_hash, scripts))]),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "font-src 'self'",
            f"connect-src 'self'{socket_source}",
            "worker-src 'none'",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _page(title: str, words: str, *, to: str = "/", at_once: bool = False) -> bytes:
    """A small page with a link to the site. With `at_once` it leads there by itself."""
    to = html.escape(to)
    refresh = f'<meta http-equiv="refresh" content="0; url={to}">' if at_once else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}<style>{_STYLE}</style></head>'
        f"<body><main><h1>{html.escape(title)}</h1><p>{html.escape(words)}</p>"
        f'<p><a href="{to}">Open the exercises</a></p></main></body></html>'
    ).encode()


async def _respond(send: Send, status: int, body: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a complete response, after which the connection is closed unless the request was in order."""
    headers: Headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    if status >= 400:
        headers.append((b"connection", b"close"))  # the body of the request may still be on its way
    policy = f"{_nothing()}; style-src {_hash(_STYLE.encode())}"
    await send(_protected({"type": "http.response.start", "status": status, "headers": [*headers, *more]}, policy))
    await send({"type": "http.response.body", "body": body})
