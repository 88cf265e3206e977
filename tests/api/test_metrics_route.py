"""/metrics over the API: counters at 0, routes as templates, bounded labels."""

from __future__ import annotations

import re

from tests.api.conftest import Service


async def test_the_first_scrape_has_the_three_counters_at_zero(service: Service):
    page = (await service.http.get("/metrics")).text
    for name in ("rollout_failed_total", "rollout_dropped_groups_total", "rollout_stale_groups_total"):
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        assert values
        assert set(values) == {"0.0"}


async def test_requests_are_counted_by_the_route_and_never_by_what_a_client_made_up(service: Service):
    before = await requests_counted(service)
    for number in range(5):
        await service.http.get(f"/groups/g-{number}?x={number}")
        await service.http.get(f"/made/up/{number}")
        await service.http.request(f"METHOD{number}", "/status")
    after = await requests_counted(service)
    assert after.keys() == before.keys(), "no series that was not there from the first scrape"
    assert {labels: float(count) for labels, count in after.items() if count != "0.0"} == {
        'route="GET /groups/{group_id}",status="4xx"': 5,
        'route="unmatched",status="4xx"': 10,
        'route="GET /metrics",status="2xx"': 1,
    }


async def requests_counted(service: Service) -> dict[str, str]:
    page = (await service.http.get("/metrics")).text
    return dict(re.findall(r"^rollout_http_requests_total\{(.*)\} (\S+)$", page, re.MULTILINE))


async def test_the_page_is_prometheus_text_or_openmetrics(service: Service):
    answer = await service.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    answer = await service.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
