"""A scripted OTLP collector on a real socket, for the tests of tracing."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.listening import end


class Collector:
    """Used as `async with Collector() as collector`; keeps the spans it was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.silent = False
        """Take requests and never answer them."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    async def __aenter__(self) -> Collector:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await end(self._runner)

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.silent:
            await asyncio.Event().wait()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in batch.resource.attributes})
            for scope in batch.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def facts(span: Any) -> dict[str, Any]:
    """The attributes of a span on the wire."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
