"""Print the test files that CI runs with --deep: of changed families, and one shard of the rest.

A family is a folder of tests. A change touches it if a component of a changed path has its name;
a change of a header in cuda_src/common touches all families with kernels. The base of the change is
the commit CI_BASE, by default the last one that is six hours older than HEAD. One of `SHARDS`
shards of the other files is chosen by HEAD's hash, so that successive commits run all of them. A
change of more than `MOST_FAMILIES` would run nearly everything: it runs two shards of all files.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
KERNEL_FAMILIES = (
    "activations",
    "attention",
    "cache",
    "embedding",
    "linear",
    "losses",
    "norms",
    "ops",
    "optimizer",
    "rope",
    "sampling",
    "softmax",
)
SHARDS = 4
MOST_FAMILIES = 2
SIX_HOURS = 6 * 60 * 60


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    command = ["git", "-C", str(TESTS.parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def base_commit() -> str:
    """Return the commit that the change is compared with."""
    named = os.environ.get("CI_BASE", "")
    if named.strip("0"):  # a branch's first push has none: its name is all zeros
        return named
    before = int(git("log", "-1", "--format=%ct")) - SIX_HOURS
    return git("rev-list", "-1", f"--before={before}", "HEAD") or git(
        "rev-list", "--max-parents=0", "HEAD"
    )


def touched_families(paths: list[str], families: set[str]) -> set[str]:
    """Return the families that changed paths touch."""
    # The innermost folder counts: cupyattn/ops/norms touches the norms, not tests/ops.
    named = [[part for part in Path(path).parts if part in families] for path in paths]
    touched = {parts[-1] for parts in named if parts}
    if any(path.startswith("cuda_src/common/") for path in paths):
        touched |= families.intersection(KERNEL_FAMILIES)
    return touched


def selected(files: list[Path], touched: set[str], shard: int) -> list[Path]:
    """Return the files of touched families and those of the shard."""
    shards = {shard}
    if len(touched) > MOST_FAMILIES:
        touched, shards = set(), {shard, (shard + 1) % SHARDS}
    return [
        path
        for path in files
        if path.parts[1] in touched or zlib.crc32(path.as_posix().encode()) % SHARDS in shards
    ]


def main() -> None:
    """Print the files, one a line, relative to the repository."""
    files = sorted(path.relative_to(TESTS.parent) for path in TESTS.glob("*/**/test_*.py"))
    paths = git("diff", "--name-only", base_commit(), "HEAD").splitlines()
    families = {path.parts[1] for path in files}
    shard = int(git("rev-parse", "HEAD"), 16) % SHARDS
    for path in selected(files, touched_families(paths, families), shard):
        # Notebooks have a step of their own, in the environment that can run them.
        if not path.name.startswith("test_notebooks"):
            print(path.as_posix())


if __name__ == "__main__":
    main()
