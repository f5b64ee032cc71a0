"""The place that a command or a config names, with the credentials for it.

Keys of a Prefect block are read when a connection is made, and again when they have expired. They stay in memory: no
config, log, manifest, Prefect run or MLflow run has them.
"""

import argparse
import contextvars
from typing import Any

from flows.services import prefect_api
from tasks.config import S3Config
from tasks.errors import SetupError
from tasks.storage import as_location
from tasks.storage.bucket import Credentials, CredentialsSource
from tasks.store.layout import Store

BLOCK_TYPE = "aws-credentials"  # of the Prefect collection prefect-aws, which need not be installed here


def credentials_of(config: S3Config) -> CredentialsSource | None:
    """The keys of the config's Prefect block; None where boto3's standard chain is to find them."""
    name = config.credentials_block
    if name is None:
        return None
    context = contextvars.copy_context()  # it says which Prefect API is meant; connections are made in any thread
    return lambda: context.copy().run(read_block, name)


def credentials_now(config: S3Config) -> CredentialsSource | None:
    """As `credentials_of`, for a command that runs no flow: its Prefect API is there only while the block is read."""
    if config.credentials_block is None:
        return None
    with prefect_api():
        found = read_block(config.credentials_block)
    return lambda: found


def read_block(name: str) -> Credentials:
    """The keys in a Prefect block of the type AWS Credentials. Raises SetupError that says what is missing."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            data: dict[str, Any] = client.read_block_document_by_name(name, BLOCK_TYPE, include_secrets=True).data
        except ObjectNotFound as error:
            raise SetupError(
                f"Prefect at {client.api_url} has no block {BLOCK_TYPE}/{name} (s3.credentials_block): make it on the "
                "page Blocks, as AWS Credentials, or name another one."
            ) from error
    if not (data.get("aws_access_key_id") and data.get("aws_secret_access_key")):
        raise SetupError(
            f"The Prefect block {BLOCK_TYPE}/{name} has no access key and secret key (s3.credentials_block)."
        )
    return Credentials(
        data["aws_access_key_id"],
        data["aws_secret_access_key"],
        data.get("aws_session_token"),
        data.get("region_name"),
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """The argument OUTPUT of a command, and what it takes to reach it in a bucket."""
    parser.add_argument("output", metavar="OUTPUT", help="the output directory, or s3://BUCKET/PREFIX")
    parser.add_argument(
        "--endpoint-url", metavar="URL", help="of the bucket's store (default: AWS_ENDPOINT_URL_S3, or AWS)"
    )
    parser.add_argument(
        "--credentials-block",
        metavar="NAME",
        help="a Prefect block of the type AWS Credentials with the bucket's keys (default: boto3's standard chain)",
    )


def store_of(options: argparse.Namespace) -> Store:
    """The store that a command's OUTPUT names."""
    given = {"endpoint_url": options.endpoint_url, "credentials_block": options.credentials_block}
    config = S3Config(**{name: value for name, value in given.items() if value is not None})
    return Store(as_location(options.output, config, credentials_now(config)))
