"""SGLang's released wheels, fetched once and kept unpacked in a cache.

$XDG_CACHE_HOME/kvgeom/releases/
    .lock                        one fetcher at a time
    0.5.17/                      put in place by one rename, then never changed
        sglang/ ...              the wheel's files, as its RECORD lists them
        .wheel/                  the wheel itself, and SHA256SUMS
    with-transformers-5.12.1/    the same, for a package that some releases import
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvgeom import caching
from kvgeom import releases_wheel as wheels
from kvgeom.errors import KvgeomError

Say = Callable[[str], None]  # "what is being done: details"

_WAIT_S = 600.0
# These import only with packages older than those that the newest release is installed with.
_OLDER_PACKAGES = {
    SpecifierSet(">=0.5.17,<0.5.20"): {"transformers": "5.12.1", "tokenizers": "0.22.2"},
}


class Result(StrEnum):
    IN_PLACE = "in place"
    FETCHED = "fetched"
    REPAIRED = "repaired"


@dataclass(frozen=True)
class Package:
    name: str
    version: Version

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def folder(self) -> Path:
        """Where it lies once it is fetched; what is imported from it is directly inside."""
        own = self.name == "sglang"
        return cache() / (str(self.version) if own else f"with-{self.name}-{self.version}")


@dataclass(frozen=True)
class Fetched:
    package: Package
    result: Result
    wheel: str
    sha256: str


def cache() -> Path:
    """$XDG_CACHE_HOME/kvgeom/releases, or ~/.cache/kvgeom/releases."""
    return caching.folder("releases")


def version(name: str | Version) -> Version:
    """KvgeomError (2) where it is no release number."""
    try:
        return Version(str(name))
    except InvalidVersion:
        raise KvgeomError(
            f"'{name}' is not a release number", "give it as in 0.5.23", exit_code=2
        ) from None


def needed(names: Iterable[str | Version]) -> list[Package]:
    """The packages that these releases need for themselves, each once."""
    found = [version(name) for name in names]
    out = [Package("sglang", release) for release in found]
    for range_, packages in _OLDER_PACKAGES.items():
        if any(range_.contains(release, prereleases=True) for release in found):
            out += [Package(name, Version(text)) for name, text in packages.items()]
    return list(dict.fromkeys(out))


def tree(release: str | Version) -> Path:
    """The folder that contains a fetched release's `sglang/`; KvgeomError where there is none."""
    return import_path(release)[0]


def import_path(release: str | Version) -> list[Path]:
    """What stands on PYTHONPATH, in this order, for a fetched release to import."""
    folders = [package.folder for package in needed([release])]
    for folder in folders:
        if not folder.is_dir():
            raise KvgeomError(
                f"SGLang {release} is not complete in {cache()}: {folder.name} is missing",
                f"`kvgeom releases {release}` fetches it",
            )
    return folders


def fetch(names: Iterable[str | Version], say: Say) -> list[Fetched]:
    """Fetch what is missing, check what is there, and repair it. All in place, or KvgeomError."""
    return [
        fetch_package(package, lambda text, p=package: say(f"{p}: {text}"))
        for package in needed(names)
    ]


def fetch_package(package: Package, say: Say) -> Fetched:
    """One package; a second process waits meanwhile."""
    base = cache()
    try:
        with caching.writing(
            base,
            wait_s=_WAIT_S,
            on_wait=lambda: say(f"waiting for another kvgeom: up to {_WAIT_S:g} s"),
            refusal=KvgeomError(
                f"another kvgeom has been fetching into {base} for {_WAIT_S:g} s",
                "wait until it has ended, then run the command again: it goes on from there",
            ),
        ):
            result = _put_in_place(package, base, say)
            wheel, sha256 = wheels.recorded(package.folder)
    except OSError as error:
        raise KvgeomError(
            f"{error.filename or base}: {error.strerror or error}; {package} is not fetched",
            "free 200 MB a release there, or set XDG_CACHE_HOME to a folder that can be written",
        ) from None
    return Fetched(package, result, wheel, sha256)


def _put_in_place(package: Package, base: Path, say: Say) -> Result:
    folder, kept = package.folder, None
    there = folder.exists()
    if there:
        say(f"checking: {folder}")
        kept, wrong = wheels.kept(folder), wheels.difference(folder)
        if kept and not wrong:
            return Result.IN_PLACE
        say(f"repairing: {wrong or 'the wheel that was kept is not as it was fetched'}")
    temporary = Path(tempfile.mkdtemp(prefix=caching.TEMPORARY, dir=base))
    try:
        new = temporary / "new"
        new.mkdir()
        wheel = kept or wheels.download(str(package), temporary / "download", say)
        say(f"unpacking: {wheel.name}")
        wheels.unpack(wheel, new)
        if there:
            folder.rename(temporary / "old")
        new.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Result.REPAIRED if there else Result.FETCHED
