"""The page against a scripted backend: what it shows of every answer, and what it does when none comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.backend import Backend, detail, engine, live, rollout, row, sample, status
from tests.page.browser import Page

HOSTILE = '<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><b>bold</b> & &amp;'
HALT = {
    "reason": "1 group(s) in a row failed whole",
    "group_id": "g-7",
    "engine": "http://10.0.0.8:8000",
    "error": "400: min_p must be in [0, 1], got 1.5",
    "since": "2026-11-30T01:00:03.456Z",
}
ROWS = ".groups-table .rows .row"


async def count(page: Page, name: str) -> str:
    return await page.text(f"[data-count={name}]")


async def listed(page: Page, number: int) -> list[str]:
    """Ids of the list, once it has so many."""
    await page.wait(f"document.querySelectorAll('{ROWS}').length === {number}")
    found: list[str] = await page.run(f"[...document.querySelectorAll('{ROWS} .open')].map(link => link.innerText)")
    return found


async def focused(page: Page) -> str:
    """The group whose link in the list has the focus."""
    return str(await page.run("document.activeElement?.dataset?.group ?? document.activeElement?.id ?? ''"))


class TestOverview:
    async def test_shows_what_the_newest_object_says(self, page: Page, backend: Backend) -> None:
        groups = {"pending": 1234, "generating": 12, "ready": 41, "acked": 12403, "stale": 118, "dropped": 37}
        flow = [{"from": "pending", "to": "generating", "count": 12612}, {"from": "ready", "to": "stale", "count": 22}]
        staleness = [{"staleness": 0, "groups": 5210}, {"staleness": 4, "groups": 3}]
        rewards = [{"policy_version": v, "groups": 8, "mean": v / 10} for v in range(10)]
        await backend.push(status=status(groups=groups), flow=flow, staleness=staleness, rewards=rewards)
        await page.open(backend.url)
        await page.wait_text("[data-figure=version]", "7")
        assert await page.text("[data-figure=slots]") == "96 / 128"
        assert await page.text("[data-figure=tokens-per-s]") == "12.3k/s"
        assert await count(page, "submitted") == "13,845"
        assert await count(page, "outstanding") == "1,287"
        assert "adds up" in await page.text(".verdict")
        assert await page.text("[data-state=pending] [data-count]") == "1,234"
        assert await page.text("[data-passed=pending-generating]") == "12.6k"
        assert "stale 22" in await page.text(".stop:has([data-count=ready]) .off")
        bars = await page.run("[...document.querySelectorAll('[data-staleness]')].map(bar => bar.innerText)")
        assert bars == ["5,210", "0", "0", "0", "3"]
        assert await page.text(".rewards .readout") == "version 9: mean 0.900 over 8 groups"

    async def test_a_sum_that_does_not_add_up_is_said(self, page: Page, backend: Backend) -> None:
        await backend.push(status=status(submitted=99))
        await page.open(backend.url)
        await page.wait_text(".verdict", "does not add up")

    async def test_engines_show_health_load_and_error(self, page: Page, backend: Backend) -> None:
        down = engine(1, healthy=False, in_flight=0, error="Connect call failed")
        await backend.push(status=status(engines=[engine(), down, engine(2, behind=True, weight_version="default")]))
        await page.open(backend.url)
        await page.wait_text(".engines", "Connect call failed")
        rows = await page.run("[...document.querySelectorAll('.engines .rows .row')].map(row => row.innerText)")
        assert "healthy" in rows[0]
        assert "96 / 256" in rows[0]
        assert "down" in rows[1]
        assert "behind" in rows[2]
        assert "weights default" in rows[2]
        assert "1 of 3 engines down: 10.0.0.8:8000" in await page.text("#more")

    async def test_tokens_show_what_was_wasted_and_why(self, page: Page, backend: Backend) -> None:
        totals = backend.view["totals"] | {"tokens_generated": 20_000, "tokens_wasted": {"stale": 5_000, "failed": 0}}
        await backend.push(totals=totals)
        await page.open(backend.url)
        await page.wait_text(".tokens", "wasted: stale")
        assert "25 % wasted" in await page.text(".tokens")
        assert "failed" not in await page.text(".tokens")

    async def test_recent_errors_link_to_their_group_and_versions_wait_for_a_click(
        self, page: Page, backend: Backend
    ) -> None:
        at = "2026-11-30T01:02:03.456Z"
        bump = {"at": at, "kind": "version", "group_id": None, "engine": None, "text": "version 7"}
        failed = bump | {"kind": "rollout_failed", "group_id": "g-5", "text": "400 too long"}
        await backend.push(recent=[bump, failed])
        await page.open(backend.url)
        assert "400 too long" in await page.wait_text(".recent-list", "g-5")
        assert "version 7" not in await page.text(".recent-list")
        await page.click(".recent input")
        await page.wait_text(".recent-list", "version 7")
        assert await page.run("document.querySelector('.recent-list a').getAttribute('href')") == "#/groups/g-5"

    async def test_many_groups_of_one_version_do_not_hide_an_error(self, page: Page, backend: Backend) -> None:
        stale = {"at": backend.view["at"], "kind": "group_stale", "engine": None, "text": "version 1 was too old"}
        events = [stale | {"group_id": f"g-{n}"} for n in range(40, 0, -1)]
        failed = stale | {"kind": "rollout_failed", "group_id": "g-50", "text": "400 too long"}
        await backend.push(recent=[*events, failed])
        await page.open(backend.url)
        await page.wait_text(".recent-list", "400 too long")
        entries = await page.run("[...document.querySelectorAll('.recent-list .what')].map(entry => entry.innerText)")
        assert entries == ["g-40 g-39 g-38 and 37 more version 1 was too old", "g-50 400 too long"]


class TestSentence:
    async def test_says_the_worst_of_what_the_run_does(self, page: Page, backend: Backend) -> None:
        await page.open(backend.url)
        busy = {"generating": 3, "ready": 64}
        done = {"acked": 5}
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({}, "Generating", "2 groups on 96 of 128 slots"),
            ({"leases": {"live": 0, "waiting_calls": 2}}, "Generating", "The trainer waits (2 lease calls)"),
            ({"groups": busy, "blocked": "max_ready_groups"}, "Waiting for the trainer", "queues are full"),
            ({"groups": busy, "blocked": "pace"}, "Waiting for the trainer", "3 groups still generating"),
            ({"blocked": "wait_for_version"}, "Waiting for the trainer's version", "dispatch.wait_for_version"),
            ({"paused": True, "blocked": "paused"}, "Paused", "2 groups in work end as they are"),
            ({"halted": HALT, "blocked": "halted", "paused": True}, "HALTED", "failed whole"),
            (
                {"engines": [engine(healthy=False, error="Connect call failed")]},
                "NO HEALTHY ENGINE",
                "None of 1 engine takes work",
            ),
            ({"engines": [engine(behind=True)]}, "EVERY ENGINE IS BEHIND", ""),
            ({"halted": HALT, "store": {"ok": False, "error": "disk full"}}, "STORE TROUBLE", "cannot commit"),
            ({"groups": done, "slots": {"total": 8, "used": 0, "free": 8}, "final": True}, "Exhausted", "5 groups"),
            ({"groups": done, "slots": {"total": 8, "used": 0, "free": 8}}, "Idle", "POST /prompts"),
        ]
        for changes, headline, part in cases:
            await backend.push(status=status(**changes))
            await page.wait(f"document.getElementById('headline').innerText === {json.dumps(headline)}")
            await page.wait_text("#sentence", part)

    async def test_a_halt_says_why_where_and_what_to_do(self, page: Page, backend: Backend) -> None:
        await backend.push(status=status(halted=HALT, blocked="halted"))
        await page.open(backend.url)
        await page.wait_text("#headline", "HALTED")
        now = await page.text("#now")
        for part in (
            HALT["error"],
            "10.0.0.8:8000",
            "2 m 0 s ago",
            "mend the cause",
            f"curl -X POST {backend.url}resume",
        ):
            assert part in now
        assert await page.run("document.querySelector('#more a').getAttribute('href')") == "#/groups/g-7"
        assert (await page.run("document.title")).startswith("✕ HALTED · v7")

    async def test_is_read_aloud_when_it_changes_and_not_at_every_number(self, page: Page, backend: Backend) -> None:
        await page.open(backend.url)
        await page.wait_text("#headline", "Generating")
        await page.run(
            "window.said = []; new MutationObserver(() => said.push(document.getElementById('announce').textContent))"
            ".observe(document.getElementById('announce'), {childList: true, characterData: true, subtree: true})"
        )
        for used in range(3):
            await backend.push(status=status(slots={"total": 128, "used": used, "free": 128 - used}))
            await page.wait_text("#sentence", f"on {used} of 128")
        await backend.push(status=status(halted=HALT))
        await page.wait_text("#headline", "HALTED")
        assert await page.run("said") == [f"HALTED: {HALT['error']}"]
        assert await page.run("document.getElementById('announce').getAttribute('aria-live')") == "polite"


class TestStream:
    async def test_a_posted_version_changes_the_page_without_a_reload(self, page: Page, backend: Backend) -> None:
        await page.open(backend.url)
        await page.wait_text("[data-figure=version]", "7")
        await page.run("void (window.same = true)")
        await backend.push(status=status(policy_version=8))
        await page.wait_text("[data-figure=version]", "8")
        assert await page.run("window.same")

    async def test_lines_may_be_cut_anywhere(self, page: Page, backend: Backend) -> None:
        event = {
            "at": backend.view["at"],
            "kind": "store_down",
            "group_id": None,
            "engine": None,
            "text": "voilà 数学 🜂" * 9,
        }
        backend.cut = 7
        await backend.push(recent=[event])
        await page.open(backend.url)
        assert await page.wait_text(".event-text", "voilà") == "voilà 数学 🜂" * 9

    async def test_a_lost_connection_is_said_dims_the_page_and_heals(self, page: Page, backend: Backend) -> None:
        page.expected = ["net::ERR_"]
        await page.open(backend.url)
        await page.wait_text("[data-figure=version]", "7")
        await backend.stop()
        await page.wait_text("#headline", "CONNECTION LOST")
        assert "since" in await page.text("#sentence")
        await page.wait_text("#as-of", "ago")
        assert await page.run("parseFloat(getComputedStyle(document.getElementById('view')).opacity)") < 1
        backend.view = live(status=status(policy_version=9))
        await backend.start()
        await page.wait_text("[data-figure=version]", "9")
        await page.wait_text("#headline", "Generating")
        assert await page.run("getComputedStyle(document.getElementById('view')).opacity") == "1"

    async def test_updates_leave_the_page_as_large_as_it_was(self, page: Page, backend: Backend) -> None:
        recent = {"at": backend.view["at"], "kind": "store_down", "group_id": None, "engine": None, "text": "0"}
        await backend.push(recent=[recent | {"text": str(i)} for i in range(50)])
        await page.open(backend.url)
        await page.wait("document.querySelectorAll('.recent-list li').length === 50")
        before = await page.run("document.querySelectorAll('*').length")
        for number in range(200):
            events = [recent | {"text": str(number + i)} for i in range(50)]
            await backend.push(recent=events, status=status(policy_version=number))
        await page.wait_text("[data-figure=version]", "199")
        assert await page.run("document.querySelectorAll('*').length") == before

    async def test_nothing_comes_from_elsewhere(self, page: Page, backend: Backend) -> None:
        await page.open(backend.url)
        await page.wait_text("#headline", "Generating")
        loaded = await page.run("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert any(name.endswith("/page/main.js") for name in loaded)
        assert all(name.startswith(backend.url) for name in loaded)


class TestKeys:
    async def test_asks_for_a_key_says_when_it_is_wrong_and_keeps_it_in_the_tab(
        self, page: Page, backend: Backend
    ) -> None:
        page.expected = ["status of 401"]
        backend.key = "rsk_good"
        await page.open(backend.url)
        await page.wait_text("#key-dialog", "a key is needed")
        for key in ("rsk_bad", "rsk_good"):
            await page.wait("document.activeElement.id === 'key-input'")
            await page.type(key)
            await page.press("Enter")
            if key == "rsk_bad":
                await page.wait_text("#key-dialog", "was not accepted")
        await page.wait_text("#headline", "Generating")
        assert not await page.run("document.getElementById('key-dialog').open")
        assert await page.run("[...Object.values(sessionStorage)]") == ["rsk_good"]
        assert await page.run("localStorage.length + document.cookie.length") == 0
        await page.go("#/groups")
        await page.wait_text(".groups", "No group.")

    async def test_a_key_that_may_not_read_is_told_so(self, page: Page, backend: Backend) -> None:
        page.expected = ["status of 403"]
        backend.refusal = (403, "role submit may not read.")
        await page.open(backend.url)
        await page.wait_text("#headline", "403")
        assert "role submit may not read. Use a key with role read" in await page.text("#sentence")
        assert not await page.run("document.getElementById('key-button').hidden")


class TestGroups:
    @pytest.fixture
    async def many(self, backend: Backend) -> Backend:
        backend.rows = [row(n, state="stale" if n % 40 == 0 else "acked", error=n % 40 or None) for n in range(1, 402)]
        for one in backend.rows:
            one["error"] = "version 1 was too old at version 6, max_staleness 4" if one["state"] == "stale" else None
        await backend.push(status=status(groups={"acked": 391, "stale": 10}))
        return backend

    async def test_lists_the_newest_first_page_by_page(self, page: Page, many: Backend) -> None:
        await page.open(f"{many.url}#/groups")
        assert await listed(page, 50) == [f"g-{n}" for n in range(401, 351, -1)]
        await page.click(".pager a:last-child")
        await page.wait_text(ROWS, "g-351")
        assert await listed(page, 50) == [f"g-{n}" for n in range(351, 301, -1)]
        await page.run("history.back()")
        await page.wait_text(ROWS, "g-401")

    async def test_oldest_first_reaches_every_group_once(self, page: Page, many: Backend) -> None:
        await page.open(f"{many.url}#/groups?order=oldest")
        found = await listed(page, 50)
        while len(found) < 401:
            await page.click(".pager a:last-child")
            await page.wait_text(f"{ROWS} .open", f"g-{len(found) + 1}")
            found += await listed(page, min(50, 401 - len(found)))
        assert found == [f"g-{n}" for n in range(1, 402)]

    async def test_filters_by_state_and_says_why(self, page: Page, many: Backend) -> None:
        await page.open(f"{many.url}#/groups")
        await page.click(".chip[data-state=stale]")
        assert await listed(page, 10) == [f"g-{n}" for n in range(400, 0, -40)]
        assert {query["state"] for query in many.queries[-2:]} == {"stale"}
        assert "version 1 was too old at version 6" in await page.text(ROWS)
        await page.click(".chip[data-state=failed]")  # beside stale
        await page.wait("location.hash.includes('state=stale,failed')")
        await page.click(".chip[data-state=stale]")
        await page.wait_text(".empty", "No group that is failed")

    async def test_narrows_to_an_id_as_it_is_typed_and_opens_it(self, page: Page, many: Backend) -> None:
        many.details["g-123"] = detail(123)
        await page.open(f"{many.url}#/groups")
        await listed(page, 50)
        await page.press("/")
        assert await focused(page) == "group-filter"
        await page.type("g-123")
        await page.wait_text(f"{ROWS} .open", "g-123")
        await page.press("Enter")
        await page.wait_text("#group-title", "g-123")

    async def test_goes_on_by_itself_and_keeps_the_focus(self, page: Page, many: Backend) -> None:
        await page.open(f"{many.url}#/groups")
        await listed(page, 50)
        await page.press("j")
        assert await focused(page) == "g-401"
        many.rows.append(row(402, state="pending"))
        await many.push(status=status(groups={"pending": 1, "acked": 391, "stale": 10}))
        await page.wait_text(f"{ROWS} .open", "g-402")
        assert await focused(page) == "g-401"

    async def test_keys_lead_to_a_group_and_back(self, page: Page, many: Backend) -> None:
        many.details["g-399"] = detail(399, rollout(0))
        await page.open(many.url)
        await page.wait_text("#headline", "")
        await page.press("?")
        await page.wait("document.getElementById('help-dialog').open")
        await page.press("j")  # means nothing under the dialog
        await page.press("Escape")
        await page.press("g")
        await listed(page, 50)
        for key in ("j", "ArrowDown", "j", "j", "k"):
            await page.press(key)
        assert await focused(page) == "g-399"
        assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await page.press("Enter")
        await page.wait_text("#group-title", "g-399")
        await page.press("Escape")
        await listed(page, 50)
        assert await focused(page) == "g-399"
        await page.press("Escape")
        await page.wait("document.querySelector('.overview')")


class TestGroup:
    async def test_shows_completions_side_by_side_with_their_scores(self, page: Page, backend: Backend) -> None:
        one = rollout(0, text="x = 2", reward=1.0, rewards={"accuracy": 1.0, "style": None}, advantage=1.25)
        cut = rollout(1, text="x = ", finish_reason="length", reward=0.0, advantage=-1.25, attempts=2)
        odd = rollout(2, reward=None, rewards={"accuracy": None})
        runs = rollout(3, state="running", in_flight_s=12.0)
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Solve x + 1 = 3"}]
        backend.details["g-5"] = detail(
            5, one, cut, odd, runs, prompt=prompt, columns={"answer": "2"}, reward_errors={"style": "the judge is ill"}
        )
        await page.open(f"{backend.url}#/groups/g-5")
        await page.wait("document.querySelectorAll('.card').length === 4")
        cards = await page.run("[...document.querySelectorAll('.card')].map(card => card.innerText)")
        for part in (
            "x = 2",
            "1.000",
            "advantage +1.250",
            "accuracy 1.000",
            "style \N{EN DASH}",
            "stop",
            "5 tokens",
            "10.0.0.7",
        ):
            assert part in cards[0]
        for part in ("truncated", "advantage \N{MINUS SIGN}1.250", "2 attempts"):
            assert part in cards[1]
        assert "unscored" in cards[2]
        assert "in flight for 12 s" in cards[3]
        group = await page.text(".group")
        for part in ("Be brief.", "Solve x + 1 = 3", "answer", "the judge is ill", "4: 1 running, 3 finished"):
            assert part in group

    async def test_a_failed_rollout_shows_the_engines_own_message(self, page: Page, backend: Backend) -> None:
        message = "min_p must be in [0, 1], got 1.5"
        failed = rollout(1, state="failed", reason="rejected", error=message, engine="http://10.0.0.8:8000", attempts=1)
        backend.details["g-5"] = detail(5, rollout(0), failed)
        await page.open(f"{backend.url}#/groups/g-5")
        card = await page.wait_text(".card[data-index='1']", message)
        for part in ("failed", "The engine refused the request for good.", "10.0.0.8:8000", "1 attempt"):
            assert part in card

    async def test_a_stale_group_says_why(self, page: Page, backend: Backend) -> None:
        error = "version 1 was too old at version 6, max_staleness 4"
        backend.details["g-5"] = detail(5, state="stale", error=error, prompt=None, columns=None, sampling=None)
        await page.open(f"{backend.url}#/groups/g-5")
        assert await page.wait_text(".group .why", "too old") == error
        assert "Removed" in await page.text(".prompt")

    async def test_an_unknown_group_is_said(self, page: Page, backend: Backend) -> None:
        page.expected = ["status of 404"]
        await page.open(f"{backend.url}#/groups/g-404")
        await page.wait_text(".group", "There is no group g-404")

    async def test_what_was_read_stays_when_the_group_ends(self, page: Page, backend: Backend) -> None:
        backend.details["g-5"] = detail(5, rollout(0, text="the very words"), state="leased")
        await page.open(f"{backend.url}#/groups/g-5")
        await page.wait_text(".card", "the very words")
        backend.details["g-5"] = detail(5, state="acked", prompt=None, columns=None, sampling=None)
        await page.wait_text(".group-head", "acked")
        assert "the very words" in await page.text(".card")
        assert "as last seen" in await page.text(".tools")

    async def test_whatever_was_generated_is_text(self, page: Page, backend: Backend) -> None:
        event = {"at": backend.view["at"], "kind": "group_failed", "group_id": "g-5", "engine": None, "text": HOSTILE}
        failed = rollout(1, state="failed", reason="bad_answer", error=HOSTILE)
        backend.details["g-5"] = detail(
            5, rollout(0, text=HOSTILE, rewards={HOSTILE: 1.0}), failed, prompt=HOSTILE, columns={HOSTILE: HOSTILE},
            prompt_id=HOSTILE, error=HOSTILE,
        )  # fmt: skip
        backend.samples["g-5"] = [sample(0, ["a", HOSTILE], [-0.5])]
        backend.rows = [row(5, prompt_id=HOSTILE, error=HOSTILE, state="failed")]
        await backend.push(recent=[event], status=status(halted=HALT | {"error": HOSTILE, "group_id": HOSTILE}))
        await page.open(backend.url)
        assert await page.wait_text(".event-text", "<script>") == HOSTILE
        await page.go("#/groups")
        await page.wait_text(ROWS, HOSTILE)
        await page.go("#/groups/g-5")
        assert await page.wait_text(".completion", "<script>") == HOSTILE
        await page.press("t")
        assert await page.wait_text(".token:not(.context)[title*=script]", "<script>") == HOSTILE
        assert await page.run("document.querySelectorAll('main script, main img, main b b').length") == 0
        assert await page.run("window.hit === undefined")

    async def test_tokens_show_logprobs_context_and_what_the_pointer_is_on(self, page: Page, backend: Backend) -> None:
        backend.details["g-5"] = detail(5, rollout(0), rollout(1, state="failed", reason="timeout", error="late"))
        tokens = ["Q:", " the", " sea", "\n", None]
        backend.samples["g-5"] = [sample(0, tokens, [-0.01, -0.9, -2.0, -9.0])]
        await page.open(f"{backend.url}#/groups/g-5")
        await page.click(".tokens-toggle")
        await page.wait("document.querySelectorAll('.flow-of-tokens .token').length === 5")
        shown = await page.run(
            "[...document.querySelectorAll('.flow-of-tokens .token')]"
            ".map(token => [token.textContent, token.dataset.class ?? 'context'])"
        )
        assert shown == [["Q:", "context"], [" the", "0"], [" sea", "2"], ["↵\n", "3"], ["[104]", "4"]]
        assert "4 trained tokens of 5, mean logprob \N{MINUS SIGN}2.978" in await page.text(".sample")
        await page.run("document.querySelector('.flow-of-tokens').focus()")
        await page.press("ArrowRight")
        assert "token 1 · id 101 · logprob \N{MINUS SIGN}0.0100" in await page.text(".sample .readout")
        await page.press("ArrowRight")
        assert '" sea"' in await page.text(".sample .readout")
        assert await page.run("document.querySelector('.legend').hidden") is False
        await page.press("t")
        await page.wait("document.querySelector('.legend').hidden")


class TestLooks:
    @pytest.fixture
    async def full(self, backend: Backend) -> Backend:
        """Everything there is to show, with words that cannot be broken."""
        word = "x" * 300
        event = {
            "at": backend.view["at"],
            "kind": "group_failed",
            "group_id": "g-5",
            "engine": "http://e",
            "text": word,
        }
        kinds = ("halted", "group_dropped", "version", "engine_up")
        totals = backend.view["totals"] | {"tokens_wasted": {"stale": 12}, "groups_dropped": {"unscorable": 3}}
        states = ("pending", "generating", "scoring", "ready", "leased", "acked", "stale", "dropped", "failed")
        flow = [{"from": "generating", "to": to, "count": 3} for to in ("pending", "stale", "dropped", "failed")]
        backend.rows = [
            row(n, state=state, error=word, prompt_id=word, reason="zero_variance", engine=f"http://{word}")
            for n, state in enumerate(states, 1)
        ]
        failed = rollout(1, state="failed", reason="timeout", error=word, engine=f"http://{word}", attempts=3)
        cut = rollout(2, finish_reason="length", advantage=-1.0, rewards={word: 1.0})
        backend.details["g-5"] = detail(
            5, rollout(0, text=word, advantage=1.0), failed, cut, rollout(3, state="running", in_flight_s=3.0),
            error=word, state="leased", lease_id=word, prompt=[{"role": "user", "content": word}], columns={word: word},
        )  # fmt: skip
        backend.samples["g-5"] = [sample(0, ["a", *[word] * 5], [-0.01, -0.5, -1, -2, -9])]
        await backend.push(
            status=status(
                groups=dict.fromkeys(states, 12_345), halted=HALT | {"error": word}, threads={"total": 8, "stuck": 1},
                engines=[engine(), engine(1, healthy=False, error=word), engine(2, behind=True)],
            ),
            recent=[event, *(event | {"kind": kind} for kind in kinds)], flow=flow, totals=totals,
            staleness=[{"staleness": n, "groups": 123_456} for n in range(40)],
            rewards=[{"policy_version": v, "groups": 8, "mean": v % 7 / 10} for v in range(1000, 1040)],
        )  # fmt: skip
        return backend

    async def each_view(self, page: Page, backend: Backend) -> Any:
        await page.open(f"{backend.url}#/")
        await page.click(".recent input")
        await page.wait_text("#headline", "HALTED")
        yield "overview"
        await page.go("#/groups?order=oldest&state=outstanding,acked,stale,dropped,failed")
        await listed(page, 9)
        yield "groups"
        await page.go("#/groups/g-5")
        await page.wait("document.querySelectorAll('.card').length === 4")
        yield "group"
        await page.press("t")
        await page.wait("document.querySelectorAll('.flow-of-tokens .token').length === 6")
        yield "tokens"
        await page.press("t")
        await page.press("?")
        yield "help"
        await page.press("Escape")

    async def test_nothing_is_wider_than_a_narrow_screen(self, page: Page, full: Backend) -> None:
        async for name in self.each_view(page, full):
            await page.resize(360, 740)
            width = await page.wait("innerWidth === 360 && document.documentElement.scrollWidth")
            assert width <= 360, name

    @pytest.mark.parametrize("theme", ["light", "dark"])
    async def test_every_text_has_contrast(self, page: Page, full: Backend, theme: str) -> None:
        await page.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        grounds = set()
        async for name in self.each_view(page, full):
            poor = await page.run(POOR_CONTRAST)
            assert poor == [], (name, poor)
            grounds.add(await page.run("getComputedStyle(document.documentElement).backgroundColor"))
        assert grounds == {"rgb(244, 245, 248)" if theme == "light" else "rgb(15, 18, 23)"}

    async def test_the_theme_is_chosen_and_kept(self, page: Page, backend: Backend) -> None:
        await page.media(prefers_color_scheme="light")
        await page.open(backend.url)
        await page.click("#theme-button")
        await page.click("#theme-button")
        assert await page.text("#theme-button") == "Theme: dark"
        await page.call("Page.reload")
        await page.wait_text("#theme-button", "Theme: dark")
        assert await page.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(15, 18, 23)"

    async def test_nothing_moves_for_those_who_asked_for_it(self, page: Page, backend: Backend) -> None:
        await page.media(prefers_reduced_motion="reduce")
        await page.open(backend.url)
        await page.wait("document.querySelector('.bar-fill')")
        assert await page.run("getComputedStyle(document.querySelector('.bar-fill')).transitionDuration") == "0s"

    async def test_tab_goes_through_the_page_with_a_visible_focus(self, page: Page, backend: Backend) -> None:
        await page.open(backend.url)
        await page.wait_text("[data-figure=version]", "7")
        seen = []
        for _ in range(8):
            await page.press("Tab")
            seen.append(await page.run("document.activeElement.innerText || document.activeElement.id"))
            assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert seen[:5] == ["rollout-service", "Overview", "Groups", "Theme: auto", "?"]
        assert len(set(seen)) == 8


POOR_CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return getComputedStyle(at).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const element = text.parentElement;
    if (!text.data.trim() || !element.checkVisibility() || element.closest("dialog:not([open])")) continue;
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = element.className || element.tagName;
    if (contrast < 4.5) poor.add(`${contrast.toFixed(2)} ${name}: ${text.data.slice(0, 30)}`);
  }
  return [...poor];
})()"""
"""Texts whose contrast to what they stand on is below 4.5."""
