"""The child process: `python -m skimp.data.tokenise` with a JSON job on standard input.

It, and never the training process, imports tokenizers, pyarrow, datasets and transformers: together they hold
more memory than many techniques save, and all of it goes back when the child ends.

A job either writes stores (`stores`, with one JSON line of progress per second on standard output) or streams
documents as binary frames (`stream`, see skimp.data.pipe). Errors go the same way, so that the parent raises
them.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from skimp.core.errors import DataError, ModelError, SkimpError
from skimp.data import pipe
from skimp.data.encode import Counts, Encoder
from skimp.data.kinds import Fields, Rules
from skimp.data.readers import Entry
from skimp.data.sources import Source, SourceFile
from skimp.data.store import StoreWriter
from skimp.data.tokenizer import LoadedTokenizer, load_tokenizer


def main() -> int:
    """Run the job; 0 when done, 1 when an error was reported, 0 as well when the parent went away."""
    job = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave through the writer, which removes its half
    # Libraries print; what they print must not mix with the protocol. Keep the real output, point 1 at 2.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        kept = Path(job["kept_tokenizer"]) if job.get("kept_tokenizer") else None
        tokenizer = load_tokenizer(job["tokenizer"], job.get("end"), kept)
        if "stream" in job:
            _stream(job, tokenizer, out)
        else:
            for store in job["stores"]:
                _write(store, job, tokenizer, out)
            _say(out, {"event": "done"})
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # the parent ended; so do we, without a trace
    except SkimpError as error:
        _fail(job, out, error)
        return 1
    return 0


def _write(store: dict[str, Any], job: dict[str, Any], tokenizer: LoadedTokenizer, out: IO[bytes]) -> None:
    sources = [Source.from_dict(s) for s in store["sources"]]
    files = [file for source in sources for file in source.files]
    source_of = [i for i, source in enumerate(sources) for _ in source.files]
    encoder = Encoder(tokenizer, _rules(job), job["encoding"], source_of, [s.format for s in sources],
                      store.get("hold"), held=store.get("hold") is not None)  # fmt: skip
    encoder.look.kinds_of(files)
    firsts: dict[int, int] = {}
    said = 0.0
    try:
        with StoreWriter(Path(store["folder"]), tokenizer.size) as writer:
            for piece in encoder.documents(files):
                firsts.setdefault(piece.file, writer.documents)
                if piece.trained is None:
                    writer.add(piece.tokens)
                else:
                    writer.add(piece.tokens, piece.trained)
                if piece.last and not piece.dropped:
                    writer.end_document(piece.row, piece.digest)
                    if store.get("hold") and writer.tokens >= store["hold"]["tokens"]:
                        break
                if time.monotonic() - said > 1:
                    said = time.monotonic()
                    counts = encoder.counts
                    _say(out, {"event": "progress", "set": store["set"], "file": files[piece.file].path,
                               "files_done": piece.file, "files": len(files), "rows": counts.rows,
                               "tokens": counts.tokens})  # fmt: skip
            if writer.documents == 0:
                raise _nothing(store["set"], sources, encoder)
            writer.commit(_meta(store, sources, firsts, encoder, tokenizer))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise DataError(
            f"the token cache {store['folder']}",
            f"cannot be written: {error.strerror}",
            f"{encoder.counts.tokens} tokens so far; {2 if tokenizer.size <= 1 << 16 else 4} bytes each",
            "free space there, or set SKIMP_CACHE to a folder with room",
        ) from None


def _meta(
    store: dict[str, Any],
    sources: list[Source],
    firsts: dict[int, int],
    encoder: Encoder,
    tokenizer: LoadedTokenizer,
) -> dict[str, Any]:
    records: list[dict[str, Any]] = store["records"]
    number, following = sum(len(s.files) for s in sources), encoder.counts.documents
    first: dict[int, int] = {}
    for index in reversed(range(number)):  # a file without documents begins where the next one does
        following = first[index] = firsts.get(index, following)
    index = 0
    for number_, record in enumerate(records):
        record["kind"] = encoder.look.kinds.get(number_, "text")
        record["fields"] = encoder.look.names.get(number_, [])
        record["counts"] = vars(encoder.by_source.get(number_, Counts()))
        for file in record["files"]:
            file["first_document"] = first[index]
            index += 1
    return {
        "key": store["key"],
        "sources": records,
        "counts": vars(encoder.counts),
        "tokenizer": {"fingerprint": store["tokenizer_fingerprint"], **tokenizer.facts()},
    }


def _rules(job: dict[str, Any]) -> Rules:
    """How rows are read; a job that says nothing reads the text in `field`."""
    return Rules.of(job["rules"]) if "rules" in job else Rules(fields=Fields(text=job["field"]))


def _nothing(name: str, sources: list[Source], encoder: Encoder) -> DataError:
    reasons = ", ".join(f"{n} {why}" for why, n in encoder.counts.dropped.items() if n)
    return DataError(
        f"data from {', '.join(s.name for s in sources)}",
        f"{encoder.counts.rows} rows, of them usable: 0" + (f" ({reasons})" if reasons else ""),
        "nothing is left to train on" if name == "train" else "nothing is left to evaluate on",
        "name files with text in them, or with answers"
        if "text" not in encoder.look.kinds.values()
        else "name files with text in them",
    )


def _stream(job: dict[str, Any], tokenizer: LoadedTokenizer, out: IO[bytes]) -> None:
    stream = job["stream"]
    files = [SourceFile(**f) for f in stream["files"]]
    encoder = Encoder(tokenizer, _rules(job), job["encoding"], stream.get("source_of"), stream.get("formats"),
                      job.get("hold"))  # fmt: skip
    kinds = encoder.look.kinds_of(files)
    pipe.send_json(out, {"event": "tokenizer", **tokenizer.facts(), "kinds": kinds})
    for piece in encoder.documents(files, stream["file"], Entry(stream["row"], stream["offset"])):
        if piece.dropped:
            pipe.send_dropped(out, piece.file, piece.row, piece.offset, piece.dropped)
            continue
        tokens = pipe.marked(piece.tokens, piece.trained)
        pipe.send_tokens(out, piece.file, piece.row, piece.offset, piece.first, piece.last, tokens)
    pipe.send_json(out, {"event": "done", "counts": vars(encoder.counts)})
    out.flush()


def _fail(job: dict[str, Any], out: IO[bytes], error: SkimpError) -> None:
    kind = "ModelError" if isinstance(error, ModelError) else "DataError"
    record = {"event": "error", "kind": kind, "asked": error.asked, "found": error.found, "why": error.why,
              "instead": error.instead}  # fmt: skip
    if "stream" in job:
        pipe.send_json(out, record)
    else:
        _say(out, record)
    out.flush()


def _say(out: IO[bytes], record: dict[str, Any]) -> None:
    out.write(json.dumps(record).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
