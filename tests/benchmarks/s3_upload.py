"""How fast shards reach a bucket, beside boto3's plain `upload_file` of the same files, one after the other.

    python -m tests.benchmarks.s3_upload FOLDER [--shards 4] [--mib 256] [--rounds 5] [--out FILE]
    python -m tests.benchmarks.s3_upload FOLDER --bucket s3://BUCKET/PREFIX [--endpoint-url URL]

Without --bucket a SeaweedFS is started in FOLDER. What is compared is a batch's whole delivery: the parts with their
checksums, what the store says of the whole, and then the record. `upload_file` sends the same files with boto3's own
settings (8 MiB parts, ten at a time), and with ours (parts, parallelism). Two shards are under way at a time, as in an
extraction. The processor seconds are this process's alone, without the server's. Ways take turns, in another order each
round. All files are in the page cache. Objects are deleted.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig

from tasks.config import S3Config
from tasks.storage import S3Path, as_location
from tasks.storage.bucket import Credentials
from tasks.storage.upload import upload
from tests.integration.seaweed import KEY, SECRET, seaweed

AT_ONCE = 2  # shards
RECORD = b"{}" * 20_000  # bytes of a record with some hundred rows


def make_files(folder: Path, count: int, size: int) -> list[Path]:
    """Random bytes: a store must not gain by packing them."""
    paths = [folder / f"{number:06d}-00000000.safetensors" for number in range(count)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(0, size, 1 << 20):
                file.write(os.urandom(1 << 20))
    return paths


@contextlib.contextmanager
def target(options: argparse.Namespace) -> Iterator[tuple[str, str | None, Credentials | None]]:
    """URI, endpoint and keys of where to upload to."""
    if options.bucket:
        yield options.bucket, options.endpoint_url, None
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name, seaweed(Path(name, "weed")) as server:
        yield server.place(), server.url, Credentials(KEY, SECRET)


def measure(options: argparse.Namespace, files: list[Path]) -> dict[str, Any]:
    """MB/s of each way in each round."""
    with target(options) as (uri, url, keys):
        plain = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=keys.access_key if keys else None,
            aws_secret_access_key=keys.secret_key if keys else None,
            region_name="us-east-1" if url else None,
        )

        def ours(checksum: str) -> Callable[[Path, str], None]:
            config = S3Config(endpoint_url=url, checksum=checksum)  # type: ignore[arg-type]
            root = as_location(uri, config, (lambda: keys) if keys else None)
            assert isinstance(root, S3Path)

            def send(path: Path, folder: str) -> None:
                upload(path, root / folder / path.name)
                (root / folder / path.with_suffix(".json").name).write_bytes(RECORD)

            return send

        place = as_location(uri)
        assert isinstance(place, S3Path)

        def theirs(transfer: TransferConfig) -> Callable[[Path, str], None]:
            def send(path: Path, folder: str) -> None:
                key = f"{place.key}/{folder}/{path.name}"
                plain.upload_file(str(path), place.bucket.name, key, Config=transfer)
                plain.put_object(Bucket=place.bucket.name, Key=key.replace(".safetensors", ".json"), Body=RECORD)

            return send

        settings = S3Config()
        same = TransferConfig(multipart_chunksize=settings.part_bytes, max_concurrency=settings.uploads)
        ways = {
            "ours, crc32": ours("crc32"),
            "ours, sha256": ours("sha256"),
            "upload_file": theirs(TransferConfig()),
            "upload_file, parts as ours": theirs(same),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        processor: dict[str, list[float]] = {name: [] for name in ways}
        size = sum(path.stat().st_size for path in files)
        for number in range(-1, options.rounds):  # the first one warms up
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in order:
                folder = f"{number}-{list(ways).index(name)}"
                began, used = time.perf_counter(), time.process_time()
                with ThreadPoolExecutor(AT_ONCE) as threads:
                    list(threads.map(lambda path: ways[name](path, folder), files))  # noqa: B023 - used at once
                seconds, used = time.perf_counter() - began, time.process_time() - used
                if number >= 0:
                    rates[name].append(round(size / seconds / 1e6, 1))
                    processor[name].append(round(used / size * 1e9, 2))
                for path in files:
                    for file in (path.name, path.with_suffix(".json").name):
                        plain.delete_object(Bucket=place.bucket.name, Key=f"{place.key}/{folder}/{file}")
    middle = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "bytes": size,
        "shards": len(files),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "MB/s": rates,
        "median MB/s": middle,
        "our processor seconds a GB": processor,
        "ours of upload_file": round(middle["ours, crc32"] / middle["upload_file"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket")
    parser.add_argument("--endpoint-url")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result = measure(options, make_files(Path(name), options.shards, options.mib << 20))
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
