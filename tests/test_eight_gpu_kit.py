"""Each scenario of the 8-GPU tests fails where its condition does not hold."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from eight_gpu_client import FakeClient, kit, said
from hypothesis import assume, given
from hypothesis import strategies as st

SCENARIOS = ("full_load", "context_limit", "host_round_trip")


def abort(number, reply):
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "no memory"}


def shorten(number, reply):
    reply["output_ids"].pop()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_server_that_does_everything_right(scenario):
    assert said(scenario, FakeClient()) == ""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "change, sentence",
    [(abort, "request 0 ended with {'type': 'abort'"), (shorten, "request 0: ")],
)
def test_a_request_that_does_not_complete(scenario, change, sentence):
    client = FakeClient()
    client.change = change
    assert said(scenario, client).startswith(sentence)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_request_without_an_answer(scenario):
    client = FakeClient()
    answer = client.generate
    client.generate = lambda ids, count: answer(ids, count)[:-1]
    assert " replies" in said(scenario, client)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_server_that_its_idle_check_ended(scenario):
    client = FakeClient()
    answers = iter([client.info])

    def server_info():
        try:
            return next(answers)
        except StopIteration:
            raise ConnectionError from None

    client.server_info = server_info
    with pytest.raises(ConnectionError):
        getattr(kit, scenario)(client)


@pytest.mark.parametrize(
    "usage, info, sentence",
    [
        (0.96, {}, "token usage was 0.97 in 0 of "),
        (1.0, {"max_total_num_tokens": 64}, "64 tokens for --max-total-tokens 32"),
        (1.0, {"max_running_requests": 5}, "256 tokens for 5 requests: no two pages"),
    ],
)
def test_a_pool_that_is_not_filled(usage, info, sentence):
    client = FakeClient(**info)
    client.usage = usage
    assert said("full_load", client).startswith(sentence)


def test_usage_that_is_only_passed_through():
    client = FakeClient()
    usage = iter([0.5, 0.99, 0.99])
    client.token_usage = lambda: next(usage, 0.9)
    assert said("full_load", client).startswith("token usage was 0.97 in 2 of ")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_usage_that_cannot_be_read():
    client = FakeClient()
    client.token_usage = lambda: {}["token_usage"]
    assert said("full_load", client).startswith("token usage was 0.97 in 0 of 0 samples")


def test_a_neighbour_that_changes_a_row():
    client = FakeClient()

    def change(number, reply):
        if number == 1:  # only in a batch
            reply["output_ids"][-1] += 1

    client.change = change
    assert said("context_limit", client).startswith("request 1: [")


FIRST, SECOND, LAST = 1, 2, 2 + 256 // 64 + 1  # twice the prompt, the fillers, the prompt


@pytest.mark.parametrize(
    "at, part, value, sentence",
    [
        (FIRST, "cached_tokens_details", {"device": 64, "host": 0}, "cached tokens: "),
        (SECOND, "cached_tokens_details", None, "cached tokens: "),
        (LAST, "cached_tokens_details", {"device": 64, "host": 0}, "cached tokens: "),
        (LAST, "cached_tokens_details", {"device": 0, "host": 32}, "cached tokens: "),
        (LAST, "cached_tokens_details", None, "cached tokens: "),
        (LAST, "spec_accept_length", 1.0, "accept length 1.0, was 2.0"),
        (LAST, "output_ids", [1], "the prompt from the host: [1], not ["),
    ],
)
def test_a_prompt_that_does_not_come_back(at, part, value, sentence):
    client = FakeClient()

    def change(number, reply):
        if len(client.batches) == at:
            (reply if part in reply else reply["meta_info"])[part] = value

    client.change = change
    assert said("host_round_trip", client).startswith(sentence)


@pytest.mark.parametrize(
    "log, sentence",
    [
        ("Server is ready", "no DRAFT_POOL_PAGE_MISMATCH in: Server is ready"),
        ("PatchApplicationError: match text not found", "no DRAFT_POOL_PAGE_MISMATCH in: Patch"),
        ("DRAFT_POOL_PAGE_MISMATCH pool=4 allocator=64 reaches=320 valid_to=260", "DRAFT_POOL"),
        ("DRAFT_POOL_PAGE_MISMATCH pool=4 allocator=32 reaches=288 valid_to=288", "DRAFT_POOL"),
    ],
)
def test_a_log_that_does_not_refuse(log, sentence):
    with pytest.raises(AssertionError) as error:
        kit.refused(log, page_size=4, dcp_size=8)
    assert str(error.value).startswith(sentence)


def test_a_log_that_refuses():
    line = "E DRAFT_POOL_PAGE_MISMATCH pool=4 allocator=32 reaches=288 valid_to=260\n"
    kit.refused(f"boot\n{line * 8}", page_size=4, dcp_size=8)


@given(page=st.sampled_from([4, 32, 512]), pages=st.integers(2, 300), at_once=st.integers(1, 64))
def test_a_wave_holds_every_page(page, pages, at_once):
    """Counted request by request: as admitted, and with two tokens more."""
    assume(pages // at_once > 1)
    prompts = kit.full_load_prompts(
        capacity=pages * page + page // 2, page_size=page, requests_at_once=at_once
    )
    assert len(prompts) == kit.WAVES * at_once
    wave = [len(ids) for ids in prompts[:at_once]]
    assert sum(math.ceil(length / page) for length in wave) == pages - at_once
    assert sum(math.ceil((length + 2) / page) for length in wave) == pages


@pytest.fixture
def served():
    """A fake behind HTTP: its address, and the requests that it was sent."""
    fake, sent = FakeClient(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            load = {"loads": [{"token_usage": 0.1}, {"token_usage": fake.usage}]}
            self.answer(fake.info if self.path == "/server_info" else load)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent.append((self.path, body))
            self.answer(fake.generate(body["input_ids"], body["sampling_params"]["max_new_tokens"]))

        def answer(self, content):
            raw = json.dumps(content).encode()
            self.send_response(500 if fake.usage is None else 200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", fake, sent
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_over_http(served, scenario):
    address, _, sent = served
    assert said(scenario, kit.HttpClient(address)) == ""
    for path, body in sent:
        assert path == "/generate" and set(body) == {"input_ids", "sampling_params"}
        assert body["sampling_params"]["temperature"] == 0
        assert body["sampling_params"]["ignore_eos"] is True


def test_over_http_with_an_error(served):
    address, fake, _ = served
    fake.usage = None
    client = kit.HttpClient(address)
    for call in (client.server_info, client.token_usage, lambda: client.generate([[3]], 1)):
        with pytest.raises(kit.requests.HTTPError):
            call()
