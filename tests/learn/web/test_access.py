"""Only the learner's own browser reaches the practice site: each rule on its own, a real server, and a real browser."""

import asyncio
import base64
import contextlib
import hashlib
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from anybatch.errors import InputError
from anybatch.learn.web.access import LONGEST_ADDRESS, LONGEST_HEADERS, Access, check_host, hosts_of

TOKEN = "a-token-of-enough-characters"
HOST = "127.0.0.1:8123"
OWN = f"http://{HOST}"
LARGEST = 1000
PROTECTION = {
    "content-security-policy",
    "x-content-type-options",
    "x-frame-options",
    "referrer-policy",
    "cross-origin-opener-policy",
    "cross-origin-resource-policy",
}


class Site:
    """A site that keeps what reaches it. It echoes on a WebSocket."""

    def __init__(self, headers=(), body=b"inside"):
        self.headers, self.body = list(headers), body
        self.scopes, self.bodies, self.messages = [], [], []

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                self.messages.append(message)
                await send({"type": "websocket.send", "text": "echo"})
            await send({"type": "websocket.send", "text": "after the end"})
        elif scope["type"] == "http":
            message = await receive()
            self.bodies.append(message["body"])
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            await send({"type": "http.response.body", "body": self.body[:3], "more_body": True})
            await send({"type": "http.response.body", "body": self.body[3:]})


class Guarded:
    """A site behind `Access`, and requests to it."""

    def __init__(self, **site):
        self.site = Site(**site)
        self.access = Access(self.site, token=TOKEN, hosts=hosts_of("127.0.0.1", 8123), largest=LARGEST)
        entered = self.http(query=f"token={TOKEN}", drop=["cookie"], path="/exercise/one")
        self.entered = entered
        self.cookie = entered.headers["set-cookie"].partition(";")[0]

    def _scope(self, kind, path, query, put, add, drop, **more):
        headers = {"host": HOST, "cookie": getattr(self, "cookie", "")}
        headers |= {"origin": OWN} if kind == "websocket" else {}
        headers |= put or {}
        pairs = [(name, value) for name, value in headers.items() if name not in drop] + list(add)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        raw_path = path.encode("latin-1")
        return {"type": kind, "path": path, "raw_path": raw_path, "query_string": query.encode("latin-1")} | {
            "headers": raw,
            **more,
        }

    def http(self, method="GET", *, path="/", query="", put=None, add=(), drop=(), chunks=(b"",)):
        incoming = [
            {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
            for index, chunk in enumerate(chunks)
        ]
        scope = self._scope("http", path, query, put, add, drop, method=method)
        return Response(run(self.access, scope, incoming))

    def websocket(self, *, path="/_nicegui_ws/", query="", put=None, add=(), drop=(), messages=()):
        incoming = [{"type": "websocket.connect"}, *({"type": "websocket.receive", **each} for each in messages)]
        incoming.append({"type": "websocket.disconnect", "code": 1000})
        return run(self.access, self._scope("websocket", path, query, put, add, drop), incoming)


class Response:
    def __init__(self, sent):
        start, *rest = sent
        assert start["type"] == "http.response.start"
        self.status = start["status"]
        names = [name for name, _ in start["headers"]]
        assert len(set(names)) == len(names), names
        self.headers = {name.decode(): value.decode() for name, value in start["headers"]}
        self.body = b"".join(each["body"] for each in rest)
        assert self.headers.keys() >= PROTECTION


def run(app, scope, incoming):
    """What an app sends in answer to messages."""
    sent, waiting = [], iter(incoming)

    async def receive():
        return next(waiting)

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


NAVIGATION = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}

# Faults of a request that is in order otherwise, for HTTP and for WebSocket: the status on HTTP, and the change.
FAULTS = {
    "no Host": (400, {"drop": ["host"]}),
    "two Hosts": (400, {"add": [("host", HOST)]}),
    "two Hosts in other letters": (400, {"add": [("Host", "evil.example")]}),
    "foreign Host": (421, {"put": {"host": "evil.example:8123"}}),
    "Host without port": (421, {"put": {"host": "127.0.0.1"}}),
    "Host with another port": (421, {"put": {"host": "127.0.0.1:80"}}),
    "Host that begins alike": (421, {"put": {"host": f"{HOST}.evil.example"}}),
    "Host with a user": (421, {"put": {"host": f"evil@{HOST}"}}),
    "empty Host": (421, {"put": {"host": ""}}),
    "foreign Origin": (403, {"put": {"origin": "http://evil.example"}}),
    "Origin null": (403, {"put": {"origin": "null"}}),
    "empty Origin": (403, {"put": {"origin": ""}}),
    "Origin with another port": (403, {"put": {"origin": "http://127.0.0.1:9999"}}),
    "Origin with TLS": (403, {"put": {"origin": f"https://{HOST}"}}),
    "Origin under another own name": (403, {"put": {"origin": "http://localhost:8123"}}),
    "two Origins": (400, {"add": [("origin", OWN), ("origin", OWN)]}),
    "no cookie": (401, {"drop": ["cookie"]}),
    "empty cookie": (401, {"put": {"cookie": "anybatch_learn_8123="}}),
    "wrong cookie": (401, {"put": {"cookie": "anybatch_learn_8123=guess"}}),
    "the token as the cookie": (401, {"put": {"cookie": f"anybatch_learn_8123={TOKEN}"}}),
    "the cookie of another port": (401, {"put": {"cookie": "anybatch_learn_9999=x"}}),
    "two Cookie headers": (400, {"add": [("cookie", "a=b")]}),
    "two cookies": (400, {"put": {"cookie": "anybatch_learn_8123=a; anybatch_learn_8123=b"}}),
    "header beyond ASCII": (400, {"put": {"x-name": "caf\xe9"}}),
    "header with a line break": (400, {"put": {"x-name": "a\r\nb: c"}}),
    "header name beyond ASCII": (400, {"add": [("x-\xff", "a")]}),
    "cookie beyond ASCII": (400, {"put": {"cookie": "\xff=\xfe"}}),
    "long headers": (431, {"put": {"x-long": "a" * LONGEST_HEADERS}}),
    "long path": (414, {"path": "/" + "a" * LONGEST_ADDRESS}),
    "long query": (414, {"query": "a" * (LONGEST_ADDRESS + 1)}),
    "query beyond ASCII": (400, {"query": "a=\xff"}),
    "path with a null": (400, {"path": "/a\0b"}),
}

ACCEPTED = {
    "nothing special": {},
    "another own name": {"put": {"host": "localhost:8123", "origin": "http://localhost:8123"}},
    "Origin of the site": {"put": {"origin": OWN}},
    "a short query": {"query": "a=b&c=%FF"},
    "a path that is nearly too long": {"path": "/" + "a" * (LONGEST_ADDRESS - 1)},
    "headers in capitals": {"add": [("X-Name", "a")]},
}


@pytest.fixture(scope="module")
def guarded():
    return Guarded()


@pytest.fixture(autouse=True)
def forget(request):
    """The site forgets what reached it in other tests."""
    if "guarded" in request.fixturenames:
        site = request.getfixturevalue("guarded").site
        site.scopes, site.bodies, site.messages = [], [], []


@pytest.mark.parametrize("name", ACCEPTED)
def test_requests_of_the_own_browser_are_accepted(guarded, name):
    """The control of everything that is refused."""
    assert guarded.http(**ACCEPTED[name]).body == b"inside"
    assert guarded.websocket(**ACCEPTED[name])[0] == {"type": "websocket.accept"}
    assert [scope["type"] for scope in guarded.site.scopes] == ["http", "websocket"]


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_enough_to_refuse_a_request(guarded, name):
    status, change = FAULTS[name]
    response = guarded.http(**change)
    assert response.status == status
    assert response.headers["cache-control"] == "no-store"
    assert "set-cookie" not in response.headers
    assert not guarded.site.scopes


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_enough_to_refuse_a_websocket(guarded, name):
    _, change = FAULTS[name]
    (closed,) = guarded.websocket(**change)  # before it is accepted, which servers answer with 403
    assert closed["type"] == "websocket.close"
    assert not guarded.site.scopes


def test_a_websocket_needs_an_origin(guarded):
    assert guarded.websocket(drop=["origin"])[0]["type"] == "websocket.close"
    assert not guarded.site.scopes


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "SOMETHING"])
def test_a_method_that_may_change_something_needs_an_origin(guarded, method):
    assert guarded.http(method).status == 403
    assert not guarded.site.scopes
    assert guarded.http(method, put={"origin": OWN}).status == 200
    assert guarded.http("HEAD").status == guarded.http("GET").status == 200


@pytest.mark.parametrize("cookie", ["first={0}; {1}; last=2", "{1};other=a=b", " {1} "])
def test_cookies_of_other_servers_on_this_machine_do_not_matter(guarded, cookie):
    assert guarded.http(put={"cookie": cookie.format(1, guarded.cookie)}).status == 200


@pytest.mark.parametrize("site, status", [("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)])
def test_requests_that_start_at_another_site_are_refused(guarded, site, status):
    """Another port of this machine is the same site for a browser: its requests have the cookie."""
    for more in ({}, NAVIGATION, {"origin": OWN}):
        assert guarded.http(put={"sec-fetch-site": site, **more}).status == status
    assert len(guarded.site.scopes) == (3 if status == 200 else 0)


def test_the_token_is_exchanged_for_a_cookie(guarded):
    assert guarded.entered.status == 303
    assert guarded.entered.headers["location"] == "/exercise/one"
    assert guarded.entered.headers["referrer-policy"] == "no-referrer"
    name, *attributes = guarded.entered.headers["set-cookie"].split("; ")
    assert re.fullmatch(r"anybatch_learn_8123=[\w-]{40,}", name)
    assert attributes == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert TOKEN not in str(guarded.entered.headers)
    assert Guarded().cookie != guarded.cookie


@pytest.mark.parametrize("put", [{}, {"sec-fetch-site": "none", **NAVIGATION}, {"sec-fetch-site": "same-origin"}])
def test_an_address_from_the_terminal_leads_on_by_a_redirect(guarded, put):
    response = guarded.http(query=f"token={TOKEN}", drop=["cookie"], put=put)
    assert (response.status, response.headers["location"]) == (303, "/")
    assert not guarded.site.scopes


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_an_address_from_another_site_leads_on_by_a_page(guarded, site):
    """After a redirect, the browser would not send the cookie that the redirect set."""
    put = {"sec-fetch-site": site, **NAVIGATION}
    response = guarded.http(query=f"token={TOKEN}", drop=["cookie"], put=put, path="/exercise/one")
    assert response.status == 200
    assert response.headers["set-cookie"].startswith(guarded.cookie)
    assert b'http-equiv="refresh" content="0; url=/exercise/one"' in response.body
    assert TOKEN.encode() not in response.body
    for wrong in ({**put, "sec-fetch-mode": "no-cors"}, {**put, "sec-fetch-dest": "iframe"}):
        refused = guarded.http(query=f"token={TOKEN}", drop=["cookie"], put=wrong)
        assert (refused.status, refused.headers.get("set-cookie")) == (403, None)
    assert guarded.http(query="token=wrong", drop=["cookie"], put=put).status == 403


WRONG = ["token=", "token=wrong", f"token={TOKEN}x", f"token={TOKEN[:-1]}", f"Token={TOKEN}", "token", "token=%00"]
WRONG += [f"token={TOKEN}&token={TOKEN}", "token=%C3%A9%FF", f"x=token={TOKEN}"]


@pytest.mark.parametrize("query", WRONG)
def test_a_wrong_token_is_no_way_in(guarded, query):
    response = guarded.http(query=query, drop=["cookie"])
    assert (response.status, response.headers.get("set-cookie")) == (401, None)
    assert guarded.http(query=f"a=b&token={TOKEN}", drop=["cookie"]).status == 303


def test_the_token_is_for_pages_only(guarded):
    assert guarded.http("POST", query=f"token={TOKEN}", drop=["cookie"], put={"origin": OWN}).status == 401
    assert guarded.websocket(query=f"token={TOKEN}", drop=["cookie"])[0]["type"] == "websocket.close"


def test_an_old_address_is_cleaned_for_those_who_are_in(guarded):
    response = guarded.http(query="token=of-yesterday")
    assert (response.status, response.headers["location"], response.headers.get("set-cookie")) == (303, "/", None)


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "/a?b", "/a b", "/a;b"])
def test_the_redirect_stays_on_the_site(guarded, path):
    assert guarded.http(path=path, query=f"token={TOKEN}", drop=["cookie"]).headers["location"] == "/"


def test_without_the_cookie_a_page_says_what_to_do(guarded):
    response = guarded.http(drop=["cookie"])
    assert response.status == 401
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    words = " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", response.body.decode()).split())
    assert "Look at the terminal" in words and "printed the address, with the token" in words
    assert '<a href="/">' in response.body.decode()  # for a browser that has the cookie and did not send it


@pytest.mark.parametrize("length, status", [("1000", 200), ("0", 200), ("1001", 413), ("9" * 18, 413)])
def test_the_announced_length_is_limited(guarded, length, status):
    assert guarded.http("POST", put={"origin": OWN, "content-length": length}).status == status
    assert len(guarded.site.scopes) == (status == 200)


@pytest.mark.parametrize("length", ["", "abc", "-1", "+1", "1.5", "1e3", "1_0", "0x10", " 1", "1, 1", "9" * 19])
def test_a_length_that_is_no_number_is_refused(guarded, length):
    assert guarded.http("POST", put={"origin": OWN, "content-length": length}).status == 400
    assert not guarded.site.scopes


def test_two_lengths_are_refused(guarded):
    put = {"origin": OWN, "content-length": "1"}
    assert guarded.http("POST", put=put, add=[("content-length", "1")]).status == 400
    assert guarded.http("POST", put=put, chunks=[b"a"]).status == 200


@pytest.mark.parametrize("chunks, status", [([b"a" * 600, b"b" * 400], 200), ([b"a" * 600, b"b" * 401, b"c"], 413)])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_body_is_counted_as_it_arrives(guarded, method, chunks, status):
    assert guarded.http(method, put={"origin": OWN}, chunks=chunks).status == status
    assert guarded.site.bodies == ([b"".join(chunks)] if status == 200 else [])


def test_a_browser_that_goes_away_gets_no_answer(guarded):
    scope = guarded._scope("http", "/", "", {}, (), (), method="GET")
    assert run(guarded.access, scope, [{"type": "http.disconnect"}]) == []
    assert run(guarded.access, scope, [{"type": "http.request", "body": b""}])[0]["status"] == 200


@pytest.mark.parametrize("gone", [True, False])
def test_a_missing_response_is_an_error_only_while_the_browser_waits(gone):
    async def site(scope, receive, send):
        await receive()
        if gone:
            assert (await receive())["type"] == "http.disconnect"
        raise RuntimeError("No response returned.")

    guarded = Guarded()
    guarded.access.app = site
    scope = guarded._scope("http", "/", "", {}, (), (), method="GET")
    incoming = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]
    with contextlib.nullcontext() if gone else pytest.raises(RuntimeError, match="No response"):
        assert run(guarded.access, scope, incoming) == []


@pytest.mark.parametrize(
    "fitting, large",
    [
        ({"text": "a" * 1000}, {"text": "a" * 1001}),
        ({"text": "é" * 500}, {"text": "é" * 501}),
        ({"bytes": b"a" * 1000, "text": None}, {"bytes": b"a" * 1001, "text": None}),
    ],
)
def test_a_large_message_closes_the_websocket(guarded, fitting, large):
    sent = guarded.websocket(messages=[fitting, fitting])
    assert [each.get("text") for each in sent] == [None, "echo", "echo", "after the end"]
    guarded.site.messages.clear()
    sent = guarded.websocket(messages=[fitting, large, fitting])
    assert [each["type"] for each in sent] == ["websocket.accept", "websocket.send", "websocket.close"]
    assert sent[-1]["code"] == 1009
    assert len(guarded.site.messages) == 1


def test_the_site_does_not_see_what_proxies_say(guarded):
    forged = {"x-forwarded-prefix": "//evil.example", "X-Forwarded-For": "1.2.3.4", "forwarded": "for=1.2.3.4"}
    guarded.http(put={**forged, "accept-encoding": "gzip", "accept": "text/html"})
    guarded.websocket(put=forged)
    for scope in guarded.site.scopes:
        assert {name.lower() for name, _ in scope["headers"]} <= {b"host", b"cookie", b"origin", b"accept"}


def test_the_headers_of_the_site_are_replaced_where_they_are_weaker():
    weak = [(b"Content-Security-Policy", b"default-src *"), (b"X-Frame-Options", b"ALLOWALL")]
    kept = [(b"cache-control", b"max-age=9"), (b"x-other", b"1")]
    response = Guarded(headers=[*weak, *kept, (b"content-type", b"text/javascript")]).http()
    assert "*" not in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert response.headers["x-frame-options"] == "DENY"
    assert (response.headers["cache-control"], response.headers["x-other"]) == ("max-age=9", "1")
    page = Guarded(headers=[*kept, (b"Content-Type", b"text/html; charset=utf-8")]).http()
    assert page.headers["cache-control"] == "no-store"


PAGE = """<html><head><title>&lt;script&gt;</title>
<script type="importmap">{"imports": {}}</script>
    <script>addStyle = 1;</script>
<script>addStyle("a { b: \\"c\\" } \\u003c");</script>
</head><body>%s<script type="module">
  import * as Vue from "vue"; globalThis.Vue = Vue; document.getElementById("esm-fallback")?.remove(); </script>
<script type="module">
  last("&lt;script&gt;");
</script>
</body></html>"""


def test_the_policy_allows_the_scripts_of_the_template_and_no_others():
    evil = [
        "<script>evil()</script>",
        '<script type="module">evil()</script>',
        '<script>addStyle("a" + evil() + "");</script>',
        '<script>addStyle("a"); evil("");</script>',
        '<script type="module">import * as Vue from "vue"; evil()</script>',
    ]
    page = PAGE % "\n".join(evil)
    headers = [(b"content-type", b"text/html"), (b"x-nicegui-content", b"page")]
    response = Guarded(headers=headers, body=page.encode()).http()
    assert response.body == page.encode()
    policy = response.headers["content-security-policy"]
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))

    def hashes(text):
        scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
        return {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}

    assert len(allowed) == 5
    assert allowed == hashes(PAGE)
    assert not allowed & hashes("".join(evil))
    assert f"connect-src 'self' ws://{HOST};" in policy
    assert "sha256" not in Guarded(headers=headers[:1], body=page.encode()).http().headers["content-security-policy"]


@pytest.mark.parametrize("token, hosts", [("", frozenset({HOST})), ("short", frozenset({HOST})), (TOKEN, frozenset())])
def test_a_guard_that_guards_nothing_is_refused(token, hosts):
    with pytest.raises(InputError, match=r"at least 16 characters|must have a host"):
        Access(Site(), token=token, hosts=hosts)


def test_the_start_and_the_end_of_the_server_reach_the_site(guarded):
    run(guarded.access, {"type": "lifespan"}, [])
    run(guarded.access, {"type": "something new"}, [])
    assert [scope["type"] for scope in guarded.site.scopes] == ["lifespan"]


@pytest.mark.parametrize(
    "host, expected",
    [
        ("127.0.0.1", {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}),
        ("::1", {"[::1]:81", "localhost:81"}),
        ("[::1]", {"[::1]:81", "localhost:81"}),
        ("localhost", {"127.0.0.1:81", "[::1]:81", "localhost:81"}),
        ("127.0.0.2", {"127.0.0.2:81"}),
        ("::ffff:127.0.0.1", {"127.0.0.1:81", "localhost:81"}),
        ("192.168.1.5", {"192.168.1.5:81"}),
        ("FE80::0:5", {"[fe80::5]:81"}),
        ("Box.lan", {"box.lan:81"}),
    ],
)
def test_the_hosts_of_an_address(host, expected):
    assert hosts_of(host, 80 if "localhost" in expected else 81) == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_listens_everywhere_answers_to_the_names_of_the_machine(host, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Box")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.168.1.5", 0))])
    expected = {"127.0.0.1:81", "[::1]:81", "localhost:81", "box:81", "192.168.1.5:81"}
    assert hosts_of(host, 81) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"])
def test_loopback_needs_no_permission(host):
    check_host(host, allows_others=False)


BEYOND = ["0.0.0.0", "::", "", "192.168.1.5", "10.0.0.1", "fe80::1", "::ffff:10.0.0.1", "169.254.1.1", "8.8.8.8"]
BEYOND += ["no-such-name.invalid", "localhost.evil.example", "0", "127.1", "evil.example", "1.0.0.127"]


@pytest.mark.parametrize("host", BEYOND)
def test_an_address_beyond_loopback_needs_permission(host, monkeypatch):
    # A name that leads to this machine now can lead elsewhere later.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", 0))])
    with pytest.raises(InputError) as error:
        check_host(host, allows_others=False)
    for words in ("can run code as you on this machine", "not encrypted", "ssh -L 8000:127.0.0.1:8000 user@host"):
        assert words in str(error.value)
    assert repr(host) in str(error.value)
    check_host(host, allows_others=True)


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], []])
def test_a_localhost_that_leads_elsewhere_is_beyond_loopback(addresses, monkeypatch):
    def resolve(*_, **__):
        if not addresses:
            raise socket.gaierror("unknown")
        return [(2, 1, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InputError, match="not a loopback address"):
        check_host("localhost", allows_others=False)
    addresses[:] = ["127.0.0.1"]
    check_host("localhost", allows_others=False)


@pytest.mark.parametrize(
    "host", ["http://127.0.0.1", "127.0.0.1:80", "a b", "-x", "a/b", "é.example", "a\nb", "x" * 300]
)
def test_what_is_no_host_is_refused_in_any_case(host):
    for allows_others in (False, True):
        with pytest.raises(InputError, match="must be a name or an address, without a port"):
            check_host(host, allows_others=allows_others)


SERVER = """
import socket
import fastapi, uvicorn
from nicegui import ui
from anybatch.learn.web.access import Access, hosts_of

def shown():
    out = ui.label("ready").classes("out")
    ui.add_css("body { --ab-yours: rgb(1, 2, 3) } rect { fill: var(--ab-yours) }")
    ui.html('<svg viewBox="0 0 9 9" style="max-width: 5em"><rect width="9" height="9"/></svg>', sanitize=False)
    ui.codemirror("def f(x):", language="Python", on_change=lambda event: out.set_text("editor " + event.value))
    ui.slider(min=0, max=9, value=3, on_change=lambda: out.set_text("slider"))
    with ui.dialog() as dialog, ui.card():
        ui.label("in the dialog")
    ui.button("dialog", icon="home", on_click=dialog.open)
    ui.button("press", on_click=lambda: out.set_text("pressed"))
    ui.button("evaluate", on_click=lambda: ui.run_javascript("document.title = 'evaluated'"))
    ui.button("later", on_click=lambda: ui.select(["first", "second"], value="first"))

@ui.page("/")
def page():
    shown()

@ui.page("/hostile")
def hostile():
    ui.page_title("</title><script>window.taken = 1</script>")
    ui.label("</script><script>window.taken = 2</script>`${window.taken = 3}")
    ui.add_head_html('<script>window.taken = 4</script><base href="http://evil.example/">')
    ui.add_body_html('<script type="module">window.taken = 5</script>')
    ui.html('<img src="/missing" onerror="window.taken = 6">', sanitize=False)
    ui.html('<img src="http://evil.example/x.png"><iframe src="/"></iframe>', sanitize=False)
    shown()

app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
ui.run_with(app, dark=None, tailwind=False, favicon="x", show_welcome_message=False)
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
print(port, flush=True)
access = Access(app, token=TOKEN, hosts=hosts_of("127.0.0.1", port), largest=10000)
config = uvicorn.Config(access, log_level="info", server_header=False, proxy_headers=False)
uvicorn.Server(config).run(sockets=[listener])
"""


@contextlib.contextmanager
def serving(folder):
    """A real server with a real NiceGUI app. Yields its port and the file that it logs to."""
    program = SERVER.replace("token=TOKEN", f"token={TOKEN!r}")
    environment = os.environ | {"NICEGUI_STORAGE_PATH": str(folder)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # NiceGUI behaves differently in tests
    log = folder / "log"
    with log.open("w") as file:
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
        try:
            port = process.stdout.readline().strip()
            assert port, log.read_text()
            yield int(port), log
        finally:
            process.terminate()
            process.communicate(timeout=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(folder) as (port, log):
        yield port, log
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(server):
    import httpx

    with httpx.Client(base_url=f"http://127.0.0.1:{server[0]}", timeout=30) as client:
        assert client.get("/").status_code == 401
        assert client.get("/", params={"token": TOKEN}).status_code == 303
        yield client


def test_a_real_server_serves_nicegui_to_its_own_browser_only(server, client):
    port, _ = server
    assert "nicegui" in client.get("/").text
    assert client.get("/").headers["x-frame-options"] == "DENY"
    assert "server" not in client.get("/").headers
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    path, own = "/_nicegui_ws/socket.io/?EIO=4&transport=polling", {"origin": f"http://127.0.0.1:{port}"}
    assert client.get(path, headers=own).status_code == 200
    assert client.post(path, headers=own, content=iter([b"a" * 6000] * 2)).status_code == 413
    assert client.post(path, headers=own, content=b"a" * 10001).status_code == 413
    assert client.post(path, headers=own, content=b"a" * 10000).status_code == 400  # engine.io's: no such session
    assert client.post(path, content=b"a").status_code == 403


@pytest.mark.parametrize(
    "lines",
    [
        ["GET / HTTP/1.1"],
        ["GET / HTTP/1.1", "Host: {own}", "Host: {own}"],
        ["GET / HTTP/1.1", "Host: {own}", "X-Name: \xff\xfe"],
        ["GET /?\xff HTTP/1.1", "Host: {own}"],
        ["GET /\xff HTTP/1.1", "Host: {own}"],
        ["GET /%00%FF HTTP/1.1", "Host: {own}"],
        ["POST / HTTP/1.1", "Host: {own}", "Origin: http://{own}", "Content-Length: many"],
        ["GET /_nicegui_ws/socket.io/?EIO=4 HTTP/1.1", "Host: {own}", "Cookie: a=\xff", "Upgrade: websocket"],
        ["nonsense"],
    ],
)
def test_a_real_server_survives_malformed_requests(server, lines):
    """The fixture checks at the end that no traceback was logged."""
    port, _ = server
    text = "".join(f"{line.format(own=f'127.0.0.1:{port}')}\r\n" for line in [*lines, "Connection: close", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(text.encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_real_server_refuses_foreign_websockets(server, client):
    from websockets.exceptions import ConnectionClosed, InvalidStatus
    from websockets.sync.client import connect

    port, _ = server
    address = f"ws://127.0.0.1:{port}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    own, (cookie,) = f"http://127.0.0.1:{port}", [f"{name}={value}" for name, value in client.cookies.items()]
    good = {"origin": own, "additional_headers": {"Cookie": cookie}, "proxy": None}
    with connect(address, **good) as websocket:
        assert websocket.recv(timeout=30).startswith("0")  # engine.io's greeting
        websocket.send("a" * 10001)
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=30)
        assert closed.value.rcvd.code == 1009
    for bad in ({"origin": "http://evil.example"}, {"origin": None}, {"additional_headers": {}}):
        with pytest.raises(InvalidStatus) as refused, connect(address, **{**good, **bad}):
            pass
        assert refused.value.response.status_code == 403


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert not os.environ.get("CI"), "CI needs Chromium: the site is looked at in a browser"
        pytest.skip("no Chromium on PATH")
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    quiet += ["--disable-sync", "--no-first-run", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=quiet)
        yield browser
        browser.close()


@contextlib.contextmanager
def tab(browser, **options):
    """A new browser with one page. Yields it, and the list of what it complains about."""
    context = browser.new_context(**options)
    page, complaints = context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page, complaints
    context.close()


def use(page):
    """Uses everything on the page of the server."""
    out = page.locator(".out")

    def says(words):
        page.wait_for_function("words => document.querySelector('.out').textContent.startsWith(words)", arg=words)

    out.wait_for()
    page.get_by_role("button", name="press").click()
    says("pressed")
    page.get_by_role("button", name="dialog").click()
    page.get_by_text("in the dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("in the dialog").wait_for(state="hidden")
    page.locator(".cm-content").click()
    page.keyboard.press("End")
    page.keyboard.type(" # typed")
    says("editor def f(x): # typed")
    assert page.locator(".cm-line span").count() > 1  # highlighted
    page.locator(".q-slider").click(position={"x": 30, "y": 10})
    says("slider")
    page.get_by_role("button", name="later").click()
    page.get_by_text("first").wait_for()
    page.get_by_role("button", name="evaluate").click()
    page.wait_for_function("document.title == 'evaluated'")
    assert page.evaluate("getComputedStyle(document.querySelector('rect')).fill") == "rgb(1, 2, 3)"


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nicegui_works_in_a_real_browser_without_a_violation(server, browser, scheme):
    own = f"http://127.0.0.1:{server[0]}"
    with tab(browser, color_scheme=scheme) as (page, complaints):
        page.goto(f"{own}/?token={TOKEN}")
        assert page.url == f"{own}/"  # the token is not in the address bar
        use(page)
        assert scheme in page.locator("body").get_attribute("class")
        page.reload()
        use(page)
        assert page.evaluate("document.cookie") == ""
        assert page.evaluate("window.socket.io.engine.transport.name") == "websocket"
        assert complaints == []


def test_scripts_in_the_content_do_not_run_in_a_real_browser(server, browser):
    """Also the control of the test above: violations are seen."""
    own = f"http://127.0.0.1:{server[0]}"
    with tab(browser) as (page, complaints):
        page.goto(f"{own}/hostile?token={TOKEN}")
        use(page)
        assert page.evaluate("window.taken") is None
        violations = [text for text in complaints if "Content Security Policy" in text]
        for kind in ("inline script", "inline event handler", "base-uri", "img-src", "frame-src"):
            assert any(kind in text or kind.replace("frame-src", "Framing") in text for text in violations), kind


CONNECT = """address => new Promise(done => {
  const socket = new WebSocket(address);
  socket.onopen = () => done("open");
  socket.onerror = () => done("refused");
})"""


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A page of somebody else, with links to the site. The address of the site is its path."""

    def do_GET(self):
        own = self.path[1:]
        links = f"<a id=token href='http://{own}/?token={TOKEN}'>a</a> <a id=plain href='http://{own}/'>b</a>"
        body = f"<!doctype html><title>elsewhere</title>{links}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def elsewhere():
    """The port of another server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1", "localhost"])
def test_other_pages_in_the_same_browser_cannot_reach_the_site(server, browser, elsewhere, name):
    """The browser has the cookie. It even sends it for the second, which is on the same host."""
    own = f"127.0.0.1:{server[0]}"
    path = f"{own}/_nicegui_ws/socket.io/?EIO=4&transport="
    poll = "address => fetch(address, {credentials: 'include'}).then(answer => answer.ok, () => 'refused')"
    with tab(browser) as (page, _):
        # Like a link in a mail: the first request comes from another site, and the cookie is new.
        page.goto(f"http://{name}:{elsewhere}/{own}")
        page.click("#token")
        page.locator(".out").wait_for()
        assert page.url == f"http://{own}/"
        assert page.evaluate(CONNECT, f"ws://{path}websocket") == "open"
        assert page.evaluate(poll, f"http://{path}polling") is True

        page.goto(f"http://{name}:{elsewhere}/{own}")
        assert page.evaluate(CONNECT, f"ws://{path}websocket") == "refused"
        assert page.evaluate(poll, f"http://{path}polling") == "refused"
        with page.expect_response(f"http://{own}/") as answer:
            page.click("#plain")
        assert answer.value.status == 403
        page.click("text=Open the exercises")  # the way on, which starts at the site itself
        page.locator(".out").wait_for()


def test_a_name_that_is_led_to_this_machine_does_not_open_the_site(server, browser):
    """DNS rebinding: the browser takes the site for a page of evil.example, whose scripts could then read it."""
    with tab(browser) as (page, _):
        assert page.goto(f"http://evil.example:{server[0]}/?token={TOKEN}").status == 421
        assert page.goto(f"http://localhost:{server[0]}/?token={TOKEN}").status == 200
