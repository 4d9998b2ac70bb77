from __future__ import annotations

from pathlib import Path

from tests.inference.servers import metric, serving


def test_metrics_count_requests_texts_labels_and_refusals(model_folder: Path) -> None:
    with serving(model_folder, max_text_chars=400) as client:
        answers = client.post("/predict/batch", json={"texts": ["Oil prices", "Goal!", "Shares " * 50]}).json()
        client.post("/predict", json={"text": "a" * 401})
        client.get("/one/made/up")
        client.get("/another")
        assert metric(client, "requests_total", route="/predict/batch", method="POST", status="200") == 1
        assert metric(client, "requests_total", route="/predict", status="422") == 1
        assert metric(client, "requests_total", route="unmatched", status="404") == 2
        assert metric(client, "request_seconds_count", route="/predict/batch") == 1
        assert metric(client, "refusals_total", code="text_too_long") == 1
        for label in {one["label"] for one in answers}:
            expected = sum(one["label"] == label for one in answers)
            assert metric(client, "predictions_total", label=label) == expected
        assert metric(client, "confidence_count") == 3
        assert metric(client, "truncated_texts_total") == 1
        assert metric(client, "batch_texts_sum") == 3
        assert metric(client, "batch_tokens_sum") == 4 + 4 + 24
        assert metric(client, "tokenized_texts_total") == 3
        assert metric(client, "stage_seconds_count", stage="queue") == 3
        assert metric(client, "queue_tokens") == 0
        assert metric(client, "tokens_per_second") > 0
        assert metric(client, "model_ready") == 1
        assert metric(client, "model_info", name=model_folder.name, engine="stand-in") == 1
        assert metric(client, "model_reloads_total", result="served") == 1
        assert 'distrinews_model_reloads_total{result="refused"} 0.0' in client.get("/metrics").text


def test_the_page_has_process_metrics_and_speaks_openmetrics(model_folder: Path) -> None:
    with serving(model_folder) as client:
        page = client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert "process_resident_memory_bytes" in page.text
        assert "python_gc_objects_collected_total" in page.text
        openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        assert openmetrics.text.endswith("# EOF\n")


def test_the_cache_counts_hits_and_misses_when_it_is_on(model_folder: Path) -> None:
    with serving(model_folder, cache_entries=10) as client:
        first, second = (client.post("/predict", json={"text": "Oil prices"}) for _ in range(2))
        assert first.json() == second.json()
        assert metric(client, "cache_lookups_total", result="miss") == 1
        assert metric(client, "cache_lookups_total", result="hit") == 1
