"""Page tables and index buffers of the attention backends, at the longest sequence published.

From the real backends, captured as for CUDA graphs with two requests near the context length. The
series' test modules make them and replace what needs a device.
"""

from __future__ import annotations

from types import SimpleNamespace

from kvgeom.deployment.spec import Server, Table

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")  # drafts that step
_TARGET = {
    "fa3": "fa",
    "fa4": "fa",
    "trtllm_mha": "trtllm_mha",
    "trtllm_mla": "trtllm_mla",
    "cutedsl_mla": "cutedsl_mla",
}
_DRAFT = {"fa3": "fa_draft", "fa4": "fa_draft"}
_DRAFT_INDICES = {"triton": "triton_draft", "flashinfer": "flashinfer_draft"}


def missing(server: Server) -> list[str]:
    """What `measure` does not look at of its target's and draft's backends."""
    found = []
    if not (_target_covered(server) and _draft_covered(server)):
        backends = " and ".join(dict.fromkeys((server.target, server.draft)))
        found.append(f"page tables and index buffers of the attention backends ({backends})")
    if server.window:
        found.append("page tables of sliding windows")
    return found


def _target_covered(server: Server) -> bool:
    known = server.target in (*_TARGET, "triton")
    return server.algorithm in ALGORITHMS and server.dcp_size == 1 and known


def _draft_covered(server: Server) -> bool:
    known = server.draft in _DRAFT | _DRAFT_INDICES
    return known and not server.multi_layer and not (server.mla and server.draft != "fa3")


def measure(server: Server) -> list[Table]:
    """What each table holds of one request's longest sequence, and what it needs to."""
    if not _target_covered(server):
        return []
    from sglang.test.attention_backends import device_free
    from sglang.test.attention_tables import Spec

    draft = _draft_covered(server) and server.steps > 1
    spec = Spec(server.steps, server.topk, server.draft_tokens)
    with device_free(), spec.published(server.page):
        tables = []
        if server.target in _TARGET:
            tables.append(_target_table(server, spec))
        if draft and server.draft in _DRAFT:
            tables.append(_draft_table(server, spec))
        if draft and server.draft in _DRAFT_INDICES:
            tables.append(_draft_indices(server, spec))
        return tables


def _runner(server: Server, *, draft: bool) -> SimpleNamespace:
    from sglang.test.attention_tables import runner

    return runner(server.context, server.row, server.page, mla=server.mla, draft=draft)


def _captured(server: Server, backend, batch) -> SimpleNamespace:
    """The backend's own metadata after a capture of `batch`."""
    from sglang.test.attention_tables import REQS, Guards

    with Guards():
        backend.init_cuda_graph_state(REQS, batch.positions.numel())
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        if server.topk > 1:  # a tree's prefix is filled by a replay
            backend.init_forward_metadata_out_graph(batch)
    if hasattr(backend, "forward_decode_metadata"):
        found = backend.forward_decode_metadata
        return SimpleNamespace(table=found.block_kv_indices, lengths=found.seq_lens_k)
    found = backend.forward_metadata
    return SimpleNamespace(table=found.page_table, lengths=found.cache_seqlens_int32)


def _table(name: str, runner, found: SimpleNamespace) -> Table:
    from sglang.test.attention_tables import absent_pages

    length = int(found.lengths.max())
    if length == 0:
        raise RuntimeError(f"the {name} was not filled")
    absent = max(absent_pages(runner, found.table, length))
    held = (-(-length // runner.page_size) - absent) * runner.page_size
    return Table(name, columns=held, ends_at=length)


def _target_table(server: Server, spec) -> Table:
    """Verify publishes the committed tokens and the draft's; a tree keeps its own elsewhere."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.attention_backends import build
    from sglang.test.attention_tables import REQS, Guards, batch

    runner, committed = _runner(server, draft=False), spec.committed(server.context)
    asked = batch(runner, committed, ForwardMode.TARGET_VERIFY)
    if spec.topk > 1:
        cells = spec.draft_tokens * (committed + spec.draft_tokens)
        asked.spec_info.custom_mask = torch.ones(REQS * cells, dtype=torch.bool)
    with Guards():
        backend = build(_TARGET[server.target], runner)
    return _table(f"{server.target} verify table", runner, _captured(server, backend, asked))


def _draft_table(server: Server, spec) -> Table:
    """The last draft step."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.attention_backends import build
    from sglang.test.attention_tables import REQS, Guards, batch

    runner, committed = _runner(server, draft=True), spec.committed(server.context)
    asked = batch(runner, committed, ForwardMode.DECODE)
    asked.out_cache_loc = torch.arange(REQS * spec.topk * spec.steps)
    with Guards():
        steps = build(_DRAFT[server.draft], runner, spec.topk, spec.steps).attn_backends
    return _table(f"{server.draft} draft table", runner, _captured(server, steps[-1], asked))


def _draft_indices(server: Server, spec) -> Table:
    """The index buffer of one draft step, by branch."""
    from sglang.srt.speculative.spec_utils import draft_kv_indices_used_len
    from sglang.test.attention_backends import build
    from sglang.test.attention_tables import REQS, Guards

    runner, branches = _runner(server, draft=True), REQS * spec.topk
    with Guards():
        backend = build(_DRAFT_INDICES[server.draft], runner, spec.topk, spec.steps)
        backend.init_cuda_graph_state(REQS, branches)
    committed = spec.committed(server.context)
    used = draft_kv_indices_used_len(committed * REQS, spec.topk, branches, spec.steps - 1)
    columns = backend.cuda_graph_kv_indices.shape[1] // branches
    return Table(f"{server.draft} draft index buffer", columns, used // branches)
