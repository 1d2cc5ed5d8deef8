"""What Prometheus gets from the service: to a token only, jobs and GPUs as they are, and no owner's name."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.service.rig import PREFIX, job_body, rig

from pilotage.service.tokens import create_token


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_scrape_needs_a_token_and_counts_jobs_gpus_and_answers(tmp_path: Path) -> None:
    async with rig(tmp_path, with_auth=True) as service:
        refused = await service.http.get("/metrics")
        assert refused.status_code == 401
        token = create_token(service.store, "alice")
        headers = {"authorization": f"Bearer {token}"}
        created = await service.http.post(PREFIX, json=job_body(n_gpus=2), headers=headers)
        assert created.status_code == 200
        answer = await service.http.get("/metrics", headers=headers)
        assert answer.headers["content-type"].startswith("text/plain")
        found = samples(answer.text)
        (job,) = [key for key in found if key[0] == "pilotage_service_jobs"]
        assert found[job] == 1
        gpus = {key[-1]: value for key, value in found.items() if key[0] == "pilotage_service_gpus"}
        # Two for the trainer and two for the sampler, of eight; in use or still pending.
        assert gpus["available"] == 4
        assert gpus["in_use"] + gpus["pending"] == 4
        assert found["pilotage_service_requests_total", "200", "POST"] == 1
        assert found["pilotage_service_requests_total", "401", "GET"] == 1
        assert found["pilotage_service_request_seconds_count",] == 2
        assert "alice" not in answer.text
