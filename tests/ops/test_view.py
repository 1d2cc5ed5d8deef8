"""The page over runs: what it answers, whom it answers, and that its colours are those of training."""

import asyncio
import contextlib
import html
import json
import re
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from benchmarks.bench_view import make_run
from hypothesis import given
from tests.algorithms.strategies import make_rollout, make_turn, steps

from pilotage.algorithms import BatchRules, build_batch, mask_stale
from pilotage.errors import ConfigError
from pilotage.loops import LoopSettings, TrainedGroups
from pilotage.loops.rollout_files import write_rollout
from pilotage.loops.summaries import Summary, summarise
from pilotage.ops.alarms import GUIDES, AlarmName
from pilotage.ops.view import export
from pilotage.ops.view.app import Viewer
from pilotage.ops.view.drift import drift_of
from pilotage.ops.view.fates import fate_of
from pilotage.ops.view.index import Index
from pilotage.ops.view.library import Library
from pilotage.ops.view.pages import groups
from pilotage.ops.view.workers import Workers
from pilotage.rendering import load_renderer
from pilotage.types import BranchCause, Message, Role, Rollout, TokenIds

POLICY = Path(__file__).resolve().parents[2] / "recipes" / "demo" / "policy"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
FIRST = "step-0001-00-00"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "small", steps=2, groups=2, group_size=3, tokens=600, policy=POLICY)
    return root


@contextlib.asynccontextmanager
async def viewing(root: Path, cache: Path) -> AsyncGenerator[Viewer]:
    workers = Workers(lambda: ThreadPoolExecutor(1))
    index = Index(cache=cache, workers=workers)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(index.follow())
        await asyncio.sleep(0)
        try:
            yield Viewer(Library(root), index)
        finally:
            reading.cancel()
            workers.close()


async def get(
    root: Path,
    cache: Path,
    address: str,
    *,
    key: str | None = None,
    host: str = "localhost",
    cookies: dict[str, str] | None = None,
) -> httpx.Response:
    async with viewing(root, cache) as viewer:
        app = viewer.app(key=key, is_loopback=key is None)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://{host}", cookies=cookies
        ) as client:
            return await client.get(address)


def hostile_run(root: Path) -> Path:
    make_run(root / "bad", steps=1, groups=1, group_size=2, tokens=200, policy=POLICY)
    renderer = load_renderer(POLICY)
    said = renderer.render_prompt([Message(role=Role.USER, content=HOSTILE)], [])
    rollout = make_rollout("step-0001-00-00", make_turn(None, said.tolist(), said.tolist()), reward=1.0)
    rollout = replace(rollout, task_id=HOSTILE, facts={"hand_in": HOSTILE})
    write_rollout(root / "bad" / "rollouts" / "step-0001" / f"{FIRST}.json.gz", rollout)
    return root


def stamps(root: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))


# --- pages ---


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("/", "small"),
        ("/runs/small", "mean reward"),
        ("/runs/small/steps/step-0001", FIRST),
        ("/runs/small/rollouts?folder=step-0001", FIRST),
        (f"/runs/small/rollouts/{FIRST}", "code_search"),
        (f"/runs/small/rollouts/{FIRST}?view=tokens", 'title="#3 '),
        (f"/runs/small/rollouts/{FIRST}?view=tokens", "sampler log-prob|, nats"),
        (f"/runs/small/rollouts/{FIRST}?view=tree", "history_rewritten"),
        (f"/runs/small/rollouts/{FIRST}?view=time", "verifier"),
        (f"/runs/small/rollouts/{FIRST}?view=files", "keep_trials"),
    ],
)
async def test_every_page_shows_its_subject(runs: Path, tmp_path: Path, address: str, shown: str) -> None:
    answer = await get(runs, tmp_path, address)
    assert answer.status_code == 200
    assert shown in answer.text


async def test_a_trained_token_says_how_far_the_trainer_was_from_the_sampler(
    runs: Path, tmp_path: Path
) -> None:
    address = f"/runs/small/rollouts/{FIRST}?view=tokens"
    text = (await get(runs, tmp_path, address)).text
    shown = re.findall(r'<i class="l\d t [pn]\d g(\d)" title="#[^"]* v0 gap ([+-][\d.e-]+)">', text)
    assert len(shown) > 100
    for colour, gap in shown:
        beyond = [abs(float(gap)) / bound for bound in (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)]
        assert sum(ratio > 1.06 for ratio in beyond) <= int(colour) <= sum(ratio > 0.94 for ratio in beyond)

    unknown = tmp_path / "unknown"
    shutil.copytree(runs, unknown)
    (unknown / "small" / "trainer_logprobs" / "step-0001.safetensors").write_bytes(b"torn")
    text = (await get(unknown, tmp_path, address)).text
    assert "gap +" not in text
    assert "Not on disk for single tokens" in text


@pytest.mark.parametrize("view", ["conversation", "tokens", "tree", "files", "time"])
async def test_what_a_model_or_a_task_wrote_is_never_markup(tmp_path: Path, view: str) -> None:
    root = hostile_run(tmp_path / "runs")
    answer = await get(root, tmp_path / "cache", f"/runs/bad/rollouts/{FIRST}?view={view}")
    assert answer.status_code == 200
    assert "&lt;script&gt;" in answer.text
    assert "<script>alert" not in answer.text
    assert "<img" not in answer.text


@pytest.mark.parametrize(
    "address",
    [
        "/runs/absent",
        "/runs/%2e%2e",
        "/runs/..%2f..%2fetc",
        "/runs/small/steps/step-9999",
        "/runs/small/steps/%2e%2e",
        "/runs/small/rollouts/absent",
        "/runs/small/rollouts/..%2f..%2fconfig.toml",
        "/runs/small/rollouts?lowest=much",
        "/runs/small/rollouts?order=random",
        f"/runs/small/rollouts/{FIRST}?view=secrets",
        "/static/app.py",
        "/nowhere",
    ],
)
async def test_what_is_not_there_is_one_clear_line(runs: Path, tmp_path: Path, address: str) -> None:
    answer = await get(runs, tmp_path, address)
    assert answer.status_code == 404
    assert len(answer.text.splitlines()) == 1


async def test_an_empty_run_a_torn_line_and_a_torn_rollout_are_shown_as_far_as_they_go(
    tmp_path: Path,
) -> None:
    root = tmp_path / "runs"
    (root / "empty").mkdir(parents=True)
    (root / "empty" / "config.toml").write_text("")
    assert "No finished step yet" in (await get(root, tmp_path / "cache", "/runs/empty")).text
    (root / "empty" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.5}\n{"step": 2, "rew')
    assert "1.5" in (await get(root, tmp_path / "cache", "/runs/empty")).text
    folder = root / "empty" / "rollouts" / "step-0001"
    folder.mkdir(parents=True)
    (folder / "step-0001-00-00.json.gz").write_bytes(b"\x1f\x8btorn")
    listed = await get(root, tmp_path / "cache", "/runs/empty/rollouts?folder=step-0001")
    assert "cannot be read" in listed.text
    opened = await get(root, tmp_path / "cache", f"/runs/empty/rollouts/{FIRST}")
    assert (opened.status_code, len(opened.text.splitlines())) == (404, 1)


async def test_filters_and_text_search_narrow_a_list_and_say_what_was_searched(
    runs: Path, tmp_path: Path
) -> None:
    found = await get(runs, tmp_path, "/runs/small/rollouts?folder=step-0001&text=HEADER")
    assert "of the 6 rollouts that were searched" in found.text
    assert "<mark>header</mark>" in found.text
    none = await get(runs, tmp_path, "/runs/small/rollouts?folder=step-0001&lowest=99")
    assert "0 rollouts" in none.text


async def test_an_alarm_is_on_the_page_of_its_run_and_in_the_list_with_what_to_check(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "flat"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    records = [{"step": step, "reward/mean": 0.0, "reward/count": 8} for step in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = (await get(tmp_path / "runs", tmp_path / "cache", "/runs/flat")).text
    assert "rewards_zero" in page
    assert html.escape(GUIDES[AlarmName.REWARDS_ZERO].causes[0]) in page
    assert GUIDES[AlarmName.REWARDS_ZERO].check in page
    assert "rewards_zero" in (await get(tmp_path / "runs", tmp_path / "cache", "/")).text


async def test_an_index_outlives_the_server_and_nothing_is_written_into_a_run(
    runs: Path, tmp_path: Path
) -> None:
    before = stamps(runs)
    await get(runs, tmp_path, "/runs/small/steps/step-0001")
    async with viewing(runs, tmp_path) as viewer:
        listing = viewer._index.whole_run(Library(runs).runs()[0])  # no wait: out of the cache
        assert len(listing.summaries) >= 6
    assert stamps(runs) == before


# --- who gets an answer ---


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1:7500", 200), ("[::1]:7", 200), ("evil.example", 421)]
)
async def test_on_loopback_only_names_of_this_machine_are_answered(
    runs: Path, tmp_path: Path, host: str, status: int
) -> None:
    assert (await get(runs, tmp_path, "/", host=host)).status_code == status


async def test_elsewhere_a_key_opens_the_page_and_moves_into_a_cookie(runs: Path, tmp_path: Path) -> None:
    assert (await get(runs, tmp_path, "/", key="abc", host="box")).status_code == 403
    assert (await get(runs, tmp_path, "/?key=wrong", key="abc", host="box")).status_code == 403
    opened = await get(runs, tmp_path, "/runs/small?key=abc", key="abc", host="box")
    assert (opened.status_code, opened.headers["location"]) == (303, "/runs/small")
    assert "HttpOnly" in opened.headers["set-cookie"]
    again = await get(runs, tmp_path, "/runs/small", key="abc", host="box", cookies=dict(opened.cookies))
    assert again.status_code == 200
    outside = await get(runs, tmp_path, "//evil.example?key=abc", key="abc", host="box")
    assert not outside.headers.get("location", "/").startswith("//")


async def test_every_answer_forbids_what_the_page_does_not_need(runs: Path, tmp_path: Path) -> None:
    for address in ("/", "/nowhere", "/static/view.css"):
        headers = (await get(runs, tmp_path, address)).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"


# --- exports ---


async def test_an_export_holds_everything_and_loads_nothing(runs: Path, tmp_path: Path) -> None:
    for address in ("/runs/small/export", f"/runs/small/rollouts/{FIRST}/export"):
        answer = await get(runs, tmp_path, address)
        assert "attachment" in answer.headers["content-disposition"]
        assert FIRST in answer.text
        for loads in ("<script", "<link", 'src="', 'href="/'):
            assert loads not in answer.text


async def test_an_export_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        await export(tmp_path, rollout=None, file=tmp_path / "x.html")


# --- colours and drifts ---


@pytest.mark.parametrize(
    "settings",
    [LoopSettings(max_lag=3), LoopSettings(max_lag=1, max_rollout_tokens=4, max_group_reward=0.6)],
)
@given(rollouts=steps)
def test_tokens_are_coloured_as_the_step_trained_them(
    rollouts: list[Rollout], settings: LoopSettings
) -> None:
    step = TrainedGroups(step=1, trainer_version=3, groups=[])
    whole = build_batch(rollouts, settings.batch_rules())
    batch = mask_stale(whole, trainer_version=3, max_lag=settings.max_lag)
    logprobs_of = {
        rollout.id: np.concatenate(
            [np.zeros(0, np.float32)]
            + [
                sample.sampler_logprobs[sample.loss_mask] + sample.token_ids[sample.loss_mask]
                for sample in batch.samples
                if sample.sequence_id == rollout.id
            ],
            dtype=np.float32,
        )
        for rollout in rollouts
    }
    fates = [
        fate_of(
            rollout,
            [
                summarise("step-0001", sibling).skeleton()
                for sibling in rollouts
                if sibling.group_id == rollout.group_id and sibling is not rollout
            ],
            settings,
            step=step,
            trainer_logprobs_n=logprobs_of[rollout.id],
        )
        for rollout in rollouts
    ]
    assert sum(fate.trained_tokens for fate in fates) == batch.ledger.trained_tokens
    not_trained = sum(sum(fate.reasons.values()) for fate in fates)
    assert not_trained == sum(batch.ledger.masked_tokens.values()) + sum(batch.ledger.dropped_tokens.values())
    for rollout, fate in zip(rollouts, fates, strict=True):
        assert fate.advantage == batch.advantages.get(rollout.id)
        for turn, colour in zip(rollout.trajectory.turns, fate.turns, strict=True):
            assert (colour.gaps_K is None) == (fate.trained_tokens == 0)
            if colour.gaps_K is not None:
                expected = np.where(colour.is_trained_K, turn.completion_ids, 0)
                np.testing.assert_allclose(colour.gaps_K, expected, rtol=1e-6, atol=1e-4)


def test_a_drift_shows_the_lines_that_an_agent_rewrote() -> None:
    def decode(ids: TokenIds) -> str:
        return "".join(f"{i}\n" for i in ids.tolist())

    rollout = make_rollout(
        "r",
        make_turn(None, [1], [2]),
        make_turn(0, [3, 4], [5]),
        replace(make_turn(0, [3, 9, 5], [6]), branch_cause=BranchCause.HISTORY_REWRITTEN),
        reward=1.0,
    )
    drift = drift_of(rollout.trajectory, 2, decode)
    assert drift is not None
    assert (drift.earlier_turn, drift.shared_tokens) == (1, 1)
    assert drift.lines == (("=", "3"), ("-", "4"), ("+", "9"), ("=", "5"))


# --- in a browser ---


@pytest.fixture
def address(runs: Path, tmp_path: Path) -> Iterator[str]:
    """A real server in a thread, with an event loop of its own."""
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with viewing(runs, tmp_path) as viewer:
            app = viewer.app(key=None, is_loopback=True)
            config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
            server = uvicorn.Server(config)
            servers.append(server)
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ready.set()
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    port = servers[0].servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    servers[0].should_exit = True
    thread.join(10)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a system Chromium")
def test_a_browser_walks_the_page_by_keys_without_an_error(address: str, runs: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    errors: list[str] = []

    def note_console(message: Any) -> None:
        if message.type == "error":
            errors.append(message.text)

    def note_error(error: Any) -> None:
        errors.append(str(error))

    with playwright.sync_playwright() as control:
        browser = control.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        page.on("console", note_console)
        page.on("pageerror", note_error)
        page.goto(address)
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/small")
        for path in ("", "/steps/step-0001", "/rollouts", f"/rollouts/{FIRST}"):
            page.goto(f"{address}/runs/small{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        page.keyboard.press("?")
        assert page.locator("#help").is_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("2")
        page.wait_for_url("**view=tokens")
        page.check("#by-advantage")
        page.goto(f"{address}/runs/small")
        page.wait_for_timeout(2500)  # the first answer of the poll
        with (runs / "small" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 77, "reward/mean": 2.75}\n')
        page.wait_for_selector("text=77", timeout=8000)  # a live run is followed
        browser.close()
    assert errors == []


def test_a_group_of_which_nothing_can_be_read_was_not_compared() -> None:
    unreadable = Summary(id="r", folder="step-0001", group="g", counters={}, fault="torn")
    [group] = groups([unreadable], BatchRules())
    assert (group.verdict, dict(group.advantages)) == ("", {})
