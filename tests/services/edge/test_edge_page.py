"""The edge's page, without a browser."""

import httpx2

from tests.services.edge.edge_rig import edge


async def test_the_page_loads_nothing_from_elsewhere_and_is_not_framed() -> None:
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as browser:
        answer = await browser.get(rig.url + "/")
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "<title>sluice</title>" in answer.text
        assert "http://" not in answer.text and "https://" not in answer.text and "innerHTML" not in answer.text
