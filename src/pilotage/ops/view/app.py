"""Routes of the page: read only, nothing from elsewhere, and no answer to a browser that was led here.

request -> Guard: host, key, headers -> page: files of the run -> template
"""

import asyncio
from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pilotage.errors import ConfigError
from pilotage.loops import read_rollout
from pilotage.loops.summaries import Summary
from pilotage.ops.view.filters import ORDERS, PAGE_SIZE, Query, choices
from pilotage.ops.view.guard import Guard
from pilotage.ops.view.index import Index, Listing, find_rollout
from pilotage.ops.view.library import Library, Run
from pilotage.ops.view.pages import run_context, run_row, step_context
from pilotage.ops.view.rendering import STATIC_FILES, Templates, static_text
from pilotage.ops.view.rollout_page import rollout_context
from pilotage.ops.view.summaries import Match

ROLLOUT_VIEWS = ("conversation", "tokens", "tree", "time", "files")
_WAIT_S = 0.5
"""Longest wait of a list for rollouts that were not read yet: the page says what is missing and follows."""
_SEARCH_S = 2.0
"""Longest wait of a text search; the page says how far it came, and goes on from there."""


class Viewer:
    """Answers requests about the runs of one library."""

    def __init__(self, library: Library, index: Index) -> None:
        self._library = library
        self._index = index
        self._templates = Templates()

    def app(self, *, key: str | None, is_loopback: bool) -> Starlette:
        """Return the application.

        Args:
            key: whoever has no key gets no page; None on loopback.
            is_loopback: whether the Host header must name this machine.
        """
        routes = {
            "/": self._runs,
            "/static/{name}": self._static,
            "/runs/{run}": self._run,
            "/runs/{run}/live": self._live,
            "/runs/{run}/export": self._export_run,
            "/runs/{run}/rollouts": self._rollouts,
            "/runs/{run}/steps/{folder}": self._step,
            "/runs/{run}/rollouts/{rollout}": self._rollout,
            "/runs/{run}/rollouts/{rollout}/export": self._export_rollout,
        }
        return Starlette(
            routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()],
            middleware=[Middleware(Guard, key=key, is_loopback=is_loopback)],
            exception_handlers={ConfigError: _not_found, 404: _no_page},
        )

    # --- pages ---

    async def _runs(self, request: Request) -> Response:
        rows = [run_row(run) for run in self._library.runs()]
        return self._html("runs.html", {"rows": rows, "root": str(self._library.root)})

    async def _run(self, request: Request) -> Response:
        run = self._find(request)
        listing = self._index.whole_run(run)
        return self._html("run.html", run_context(run) | _progress(listing))

    async def _step(self, request: Request) -> Response:
        run, folder = self._find(request), request.path_params["folder"]
        _require_folder(run, folder)
        listing = await self._index.folder(run, folder, wait_s=_WAIT_S)
        return self._html("step.html", step_context(run, folder, listing.summaries) | _progress(listing))

    async def _rollouts(self, request: Request) -> Response:
        run = self._find(request)
        query = Query.of(request.query_params)
        listing = await self._listing(run, query)
        found = query.select(listing.summaries)
        page = await self._page_of(run, query, found)
        context: dict[str, object] = {
            "run": run_row(run),
            "query": query,
            "found": len(found),
            "choices": choices(listing.summaries),
            "folders": run.folders(),
            "orders": ORDERS,
        }
        return self._html("rollouts.html", context | page | _progress(listing))

    async def _listing(self, run: Run, query: Query) -> Listing:
        if query.folder:
            _require_folder(run, query.folder)
            return await self._index.folder(run, query.folder, wait_s=_WAIT_S)
        return self._index.whole_run(run)

    async def _page_of(self, run: Run, query: Query, found: list[Summary]) -> dict[str, object]:
        """Return the rows of one page, or what a text search found in the time that it has."""
        matches: dict[str, Match] = {}
        if query.text:
            files = [run.path / "rollouts" / row.folder / f"{row.id}.json.gz" for row in found[query.start :]]
            hits, searched = await self._index.search(run, files, query.text, wait_s=_SEARCH_S)
            matches = {match.id: match for match in hits}
            rows = [row for row in found[query.start : query.start + searched] if row.id in matches]
            end = query.start + searched
        else:
            rows = found[query.start : query.start + PAGE_SIZE]
            end = query.start + len(rows)
        address = f"/runs/{run.name}/rollouts?"
        return {
            "rows": rows,
            "matches": matches,
            "searched": (query.start, end),
            "next": address + urlencode({**query.parameters(), "start": end}) if end < len(found) else None,
            "previous": address + urlencode(query.parameters()) if query.start else None,
        }

    async def _rollout(self, request: Request) -> Response:
        view = request.query_params.get("view", ROLLOUT_VIEWS[0])
        if view not in ROLLOUT_VIEWS:
            raise ConfigError(f"view is one of {', '.join(ROLLOUT_VIEWS)}, got {view!r}")
        context = await self._rollout_context(request)
        html = await asyncio.to_thread(self._templates.page, "rollout.html", context | {"views": [view]})
        return HTMLResponse(html)

    async def _live(self, request: Request) -> Response:
        run = self._find(request)
        listing = self._index.whole_run(run)
        revision = f"{run.revision()}{len(listing.summaries)}/{listing.total}"
        return JSONResponse({"revision": revision, "state": run.state()})

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC_FILES:
            raise ConfigError(f"no file {name}")
        return Response(static_text(name), media_type=STATIC_FILES[name])

    # --- exports ---

    async def _export_run(self, request: Request) -> Response:
        run = self._find(request)
        return _download(await self.export_run(run), run.name)

    async def _export_rollout(self, request: Request) -> Response:
        name = request.path_params["rollout"]
        return _download(await self.export_rollout(self._find(request), name), name)

    async def export_run(self, run: Run) -> str:
        """Return one HTML file with the run's curves, gauges, steps and groups; reads all rollouts."""
        steps: list[Mapping[str, object]] = []
        for folder in run.folders():
            listing = await self._index.folder(run, folder, wait_s=3600.0)
            steps.append(step_context(run, folder, listing.summaries))
        return await asyncio.to_thread(
            self._templates.export, "run_export.html", run_context(run) | {"steps": steps}
        )

    async def export_rollout(self, run: Run, wanted: str) -> str:
        """Return one HTML file with everything about a rollout.

        Raises:
            ConfigError: the run has no such rollout, or its file cannot be read.
        """
        context = await self._context_of(run, wanted) | {"views": ROLLOUT_VIEWS}
        return await asyncio.to_thread(self._templates.export, "rollout.html", context)

    # --- parts ---

    def _find(self, request: Request) -> Run:
        name = request.path_params["run"]
        run = self._library.find(name)
        if run is None:
            raise ConfigError(f"no run {name} in {self._library.root}")
        return run

    async def _rollout_context(self, request: Request) -> dict[str, object]:
        return await self._context_of(self._find(request), request.path_params["rollout"])

    async def _context_of(self, run: Run, wanted: str) -> dict[str, object]:
        path = find_rollout(run, wanted)
        if path is None:
            raise ConfigError(f"run {run.name} has no rollout {wanted}")
        try:
            rollout = await asyncio.to_thread(read_rollout, path)
        except OSError as error:
            raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
        siblings = await self._index.siblings(run, path.parent.name, rollout.group_id)
        return await asyncio.to_thread(rollout_context, run, path, rollout, siblings)

    def _html(self, template: str, context: Mapping[str, object]) -> HTMLResponse:
        return HTMLResponse(self._templates.page(template, context))


def _progress(listing: Listing) -> dict[str, object]:
    return {"indexed": len(listing.summaries), "total": listing.total}


def _require_folder(run: Run, folder: str) -> None:
    if folder not in run.folders():
        raise ConfigError(f"run {run.name} has no step {folder}")


def _download(html: str, name: str) -> Response:
    readable = "".join(
        letter if (letter.isalnum() and letter.isascii()) or letter in "-_." else "-" for letter in name
    )
    headers = {"content-disposition": f'attachment; filename="{readable}.html"'}
    return HTMLResponse(html, headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=404)


async def _no_page(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"no page {request.url.path}\n", status_code=404)
