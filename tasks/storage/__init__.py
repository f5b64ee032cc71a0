"""Where a store lies: a local directory, or a prefix of an S3 bucket.

The rest of the code goes through the part of pathlib that both have: `/`, names, `read_bytes`, `exists`, `stat`,
`unlink`, `glob`, `iterdir`, `open("rb")`. A local place is a plain `Path`, so nothing is added to it. What differs
(how a shard gets there, how a writer locks out others) is decided in `tasks/store`.
"""

from tasks.storage.places import Location, as_argument, as_location, is_remote, read_all, side_folder
from tasks.storage.s3path import S3Path

__all__ = ["Location", "S3Path", "as_argument", "as_location", "is_remote", "read_all", "side_folder"]
