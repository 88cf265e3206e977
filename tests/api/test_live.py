"""The live view, its stream, a group's tokens, and the page's files."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from rollout_service.api.live_schemas import LiveViewAnswer
from rollout_service.api.pages import CONTENT_SECURITY_POLICY, page_files
from rollout_service.api.viewers import MAX_VIEWERS
from rollout_service.core.model import DropReason, FailureReason
from tests.api.conftest import Service, settings_with
from tests.fakes import Runner, failed, finished, until


async def live_view(service: Service) -> dict[str, Any]:
    answer = await service.http.get("/live")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ready(service: Service, n: int = 1) -> None:
    await until(lambda: service.door.status().counts.groups["ready"] == n)


async def lease(service: Service, n: int = 8) -> dict[str, Any]:
    return dict((await service.post("/leases", {"max_groups": n, "wait_s": 0})).json())


async def test_the_view_has_the_status_and_what_became_of_things():
    async with Service(runner=Runner(answer=lambda job: finished(job.index))).in_process() as service:
        await service.submit("a", "b")
        await ready(service, 2)
        held = await lease(service)
        await service.post(f"/leases/{held['lease_id']}/ack")
        view = await live_view(service)
        assert view["status"] == (await service.http.get("/status")).json()
        assert view["mode"] == "grpo"
        assert view["totals"]["rollouts_finished"] == 8
        assert (view["totals"]["groups_delivered"], view["totals"]["groups_acked"]) == (2, 2)
        assert (view["totals"]["tokens_generated"], view["totals"]["tokens_delivered"]) == (24, 24)
        assert view["rewards"] == [{"policy_version": 0, "groups": 2, "mean": 1.5}]
        assert view["staleness"] == [{"staleness": 0, "groups": 2}]
        flow = {(step["from"], step["to"]): step["count"] for step in view["flow"]}
        path = ("pending", "generating", "scoring", "ready", "leased", "acked")
        assert flow == {(before, after): 2 for before, after in pairwise(path)}


async def test_what_went_wrong_is_told_newest_first_with_its_group_and_engine():
    def answer(job: Any) -> Any:
        return failed(job.index) if job.group_id == "g-1" or job.index == 0 else finished(job.index)

    settings = settings_with(groups={"num_generations": 4, "halt_after_failed_groups": 2})
    async with Service(settings=settings, runner=Runner(answer=answer)).in_process() as service:
        await service.submit("a")
        await until(lambda: service.door.status().counts.groups["failed"] == 1)
        await service.submit("b")
        await ready(service)
        view = await live_view(service)
        assert view["totals"]["rollouts_failed"] == {"rejected": 5}
        assert view["totals"]["groups_failed"] == 1
        newest, group, *rollouts = view["recent"]
        assert (newest["kind"], newest["group_id"]) == ("rollout_failed", "g-2")
        assert newest["text"] == "rejected: unlucky prompt 4711"
        assert newest["engine"] == "http://engine"
        assert (group["kind"], group["group_id"]) == ("group_failed", "g-1")
        assert [one["kind"] for one in rollouts] == ["rollout_failed"] * 4


async def test_a_halt_a_version_and_a_stale_group_are_told():
    settings = settings_with(groups={"num_generations": 4, "max_staleness": 0})
    async with Service(settings=settings).in_process() as service:
        await service.submit("a")
        await until(lambda: len(service.runner.held) == 4)
        await service.post("/policy_version", {"version": 3})
        view = await live_view(service)
        stale, version = view["recent"]
        assert (version["kind"], version["text"]) == (
            "version",
            "policy version 0 → 3: 1 groups went stale, 4 rollouts aborted",
        )
        assert (stale["kind"], stale["group_id"]) == ("group_stale", "g-1")
        assert stale["text"] == "version 0 was too old at version 3, max_staleness 0"
        assert view["totals"]["groups_stale"] == 1
        assert view["totals"]["aborts"] == 4
        group = (await service.http.get("/groups/g-1")).json()
        assert (group["state"], group["error"]) == ("stale", stale["text"])
        service.runner.answer = lambda job: failed(job.index)
        await service.submit("b")
        await until(lambda: service.door.status().halt is not None)
        async with asyncio.timeout(10):  # what is told follows its commit
            while (view := await live_view(service))["recent"][0]["kind"] != "halted":
                pass
        assert "unlucky prompt 4711" in view["recent"][0]["text"]
        assert view["totals"]["halts"] == 1


async def lines(http: httpx.AsyncClient, url: str = "/events") -> Any:
    async with http.stream("GET", url) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        async for line in answer.aiter_lines():
            yield LiveViewAnswer.model_validate(_renamed(json.loads(line)))


def _renamed(view: dict[str, Any]) -> dict[str, Any]:
    flow = [{"from_state": step["from"], "to_state": step["to"], "count": step["count"]} for step in view["flow"]]
    return view | {"flow": flow}


async def test_the_stream_begins_at_once_follows_what_happens_and_ends_with_the_service(live: Service):
    stream = lines(live.http)
    first = await anext(stream)
    assert first.status.policy_version == 0
    await live.post("/policy_version", {"version": 1})
    async with asyncio.timeout(5):
        async for view in stream:
            if view.status.policy_version == 1:
                break
        assert view.recent[0].kind == "version"
        live.viewers.close()
        async for _ in stream:
            pass
    assert live.viewers.count == 0


async def test_a_limit_ends_the_stream(live: Service):
    assert len([view async for view in lines(live.http, "/events?limit=3")]) == 3
    assert (await live.http.get("/events?limit=0")).status_code == 422
    assert (await live.http.get("/events?limit=x")).status_code == 422


async def test_viewers_are_bounded_and_leave_when_they_hang_up(live: Service):
    stream = lines(live.http)
    await anext(stream)
    assert live.viewers.count == 1
    await stream.aclose()
    await until(lambda: live.viewers.count == 0)
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=None)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=live.http.base_url, limits=limits))
        calls = [http.send(http.build_request("GET", "/events"), stream=True) for _ in range(MAX_VIEWERS + 20)]
        answers = await asyncio.gather(*calls)
        for answer in answers:
            stack.push_async_callback(answer.aclose)
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses == {200: MAX_VIEWERS, 429: 20}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "5"
        assert b"too-many-viewers" in await refused.aread()
    await until(lambda: live.viewers.count == 0)


async def test_a_line_made_before_a_change_is_followed_by_one_with_it(service: Service):
    made = service.viewers.line(service.history.serial, lambda: b"old")
    service.history.serial += 1
    assert service.viewers.line(service.history.serial, lambda: b"new") == made == (service.history.serial - 1, b"old")


async def test_viewers_share_one_line(live: Service):
    looked = 0
    status = live.door.status

    def counted() -> Any:
        nonlocal looked
        looked += 1
        return status()

    object.__setattr__(live.context, "orchestrator", _With(live.door, status=counted))
    await asyncio.gather(*(live.http.get("/events?limit=1") for _ in range(8)))
    one_view = 2
    assert looked <= 3 * one_view


class _With:
    """`door` with other methods in front."""

    def __init__(self, door: Any, **methods: Any) -> None:
        self._door, self._methods = door, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._door, name)


# tokens


async def test_samples_are_shown_token_by_token_with_the_engines_words():
    async with Service(runner=Runner(answer=lambda job: finished(job.index))).in_process() as service:
        await service.submit("a")
        await ready(service)
        body = (await service.http.get("/groups/g-1/samples")).json()
        assert (body["group_id"], body["attempt"]) == ("g-1", 1)
        assert [sample["index"] for sample in body["samples"]] == [0, 1, 2, 3]
        sample = body["samples"][2]
        assert sample["input_ids"] == [7, 8, 1, 2, 3]
        assert sample["completion_mask"] == [0, 0, 1, 1, 1]
        assert sample["old_log_probs"] == [0.0, 0.0, -0.5, -0.5, -0.5]
        assert sample["tokens"] == ["<7>", None, "<1>", "<2>", "<3>"]
        assert (sample["reward"], sample["rewards"], sample["scored"]) == (2.0, {"accuracy": 2.0}, True)
        (one,) = (await service.http.get("/groups/g-1/samples?index=3")).json()["samples"]
        assert one["index"] == 3
        assert (await service.http.get("/groups/g-1/samples?index=77")).json()["samples"] == []


async def test_samples_of_a_group_on_its_way_and_of_one_that_has_ended(service: Service):
    service.runner.answer = lambda job: {0: finished(0), 1: failed(1)}.get(job.index)
    await service.submit("a")
    await until(lambda: service.settled() == 2)
    (sample,) = (await service.http.get("/groups/g-1/samples")).json()["samples"]
    assert (sample["index"], sample["reward"], sample["advantage"], sample["scored"]) == (0, None, None, False)
    await service.http.delete("/groups/g-1")
    assert (await service.http.get("/groups/g-1/samples")).json()["samples"] == []
    assert (await service.http.get("/groups/g-9/samples")).status_code == 404
    assert (await service.http.get("/groups/nothing/samples")).status_code == 404
    assert (await service.http.get("/groups/g-1/samples?index=-1")).status_code == 422


# the page


async def test_the_page_and_its_files_come_under_a_policy_that_lets_them_load_nothing_else(service: Service):
    assert "index.html" in page_files()
    page = await service.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == page_files()["index.html"]
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    for name, content in page_files().items():
        answer = await service.http.get(f"/page/{name}")
        assert answer.content == content
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        again = await service.http.get(f"/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "..%2fpages.py", "%2e%2e", "index.html%00"])
async def test_no_other_file_is_answered(service: Service, name: str):
    assert (await service.http.get(f"/page/{name}")).status_code == 404


# the log


async def test_every_group_that_ends_has_one_line_with_ids_version_and_times_and_no_texts():
    def answer(job: Any) -> Any:
        if job.group_id == "g-2":
            return failed(job.index, reason=FailureReason.PROMPT_TOO_LONG, error="secret words")
        return finished(job.index, text="secret words")

    with capture_logs() as logs:
        async with Service(runner=Runner(answer=answer)).in_process() as service:
            await service.submit("a", "b")
            await ready(service)
            service.clock.now += 7
            held = await lease(service)
            service.clock.now += 2.5
            await service.post(f"/leases/{held['lease_id']}/ack")
    ended = {line["group_id"]: line for line in logs if line["event"] == "group_ended"}
    assert len(ended) == len([line for line in logs if line["event"] == "group_ended"]) == 2
    acked, dropped = ended["g-1"], ended["g-2"]
    assert (acked["outcome"], acked["prompt_id"], acked["policy_version"]) == ("acked", "a", 0)
    assert (acked["finished"], acked["failed"], acked["tokens"], acked["reward_mean"]) == (4, 0, 12, 1.5)
    assert (acked["ready_s"], acked["leased_s"], acked["total_s"]) == (7.0, 2.5, 9.5)
    assert acked["lease_id"] == held["lease_id"]
    assert (dropped["outcome"], dropped["reason"]) == ("dropped", DropReason.PROMPT_TOO_LONG)
    assert "secret words" not in repr(ended)
