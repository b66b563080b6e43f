"""series.lock: the structure that each edit was reviewed against, one line per edit and release.

    ["python/sglang/srt/mem_cache/x.py".pool-page-size]
    "0.5.22" = "8c1f2a90b7d31e55"
    "0.5.23" = "upstream"

A value is the digest of the code that the edit's anchors stand in, in the file as released (see
`plan.scope_digest`), or "upstream" where that release already does what the edit does. The releases
named here are the ones that kvgeom supports. Imports have no anchor and are not listed.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field

from packaging.version import Version

from kvgeom.errors import KvgeomError

UPSTREAM = "upstream"
_HEADER = "# Written by `kvgeom lock --update` after a review; see kvgeom/lock.py.\n"


@dataclass
class Lock:
    """(file, edit id) -> {release: digest}."""

    entries: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    @property
    def releases(self) -> list[Version]:
        return sorted({Version(r) for found in self.entries.values() for r in found})

    def digest(self, file: str, edit: str, release: Version) -> str | None:
        return self.entries.get((file, edit), {}).get(str(release))

    def updated(self, release: Version, found: dict[tuple[str, str], str], known: set) -> Lock:
        """With `found` as this release's lines, and without edits that are not in `known`."""
        entries = {k: dict(v) for k, v in self.entries.items() if k in known}
        for digests in entries.values():
            digests.pop(str(release), None)
        for key, digest in found.items():
            entries.setdefault(key, {})[str(release)] = digest
        return Lock({k: v for k, v in entries.items() if v})

    def dump(self) -> str:
        out = [_HEADER]
        for (file, edit), digests in sorted(self.entries.items()):
            key = edit if re.fullmatch(r"[A-Za-z0-9_-]+", edit) else f'"{edit}"'
            out.append(f'\n["{file}".{key}]\n')
            out += [f'"{r}" = "{digests[str(r)]}"\n' for r in sorted(map(Version, digests))]
        return "".join(out)


def parse(text: str) -> Lock:
    try:
        data = tomllib.loads(text)
        entries = {(file, e): d for file, edits in data.items() for e, d in edits.items()}
        lock = Lock(entries)
        lock.releases  # noqa: B018  every release is one
    except (ValueError, AttributeError, TypeError) as err:
        raise KvgeomError(
            f"series.lock cannot be read: {err}", "write it anew with `kvgeom lock --update`"
        ) from None
    return lock
