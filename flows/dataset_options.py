"""The arguments of the commands `prepare` and `export`, and what is made of them."""

import argparse
import json
from pathlib import Path

from tasks.dataset.prepare.settings import PrepareConfig
from tasks.errors import ConfigError

EXPORTS = ("specforge", "speculators", "modelopt", "torchspec", "pt")


def add_prepare_options(parser: argparse.ArgumentParser) -> None:
    """The command `prepare`: the fields of PrepareConfig."""
    about = {name: field.description for name, field in PrepareConfig.model_fields.items()}
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help=about["sources"])
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help=about["tokenizer"])
    parser.add_argument("--max-seq-len", type=int, required=True, metavar="TOKENS", help=about["max_seq_len"])
    parser.add_argument("--out", type=Path, required=True, dest="output", metavar="FILE.jsonl", help=about["output"])
    parser.add_argument(
        "--on-too-long",
        choices=("fail", "truncate", "skip"),
        default="truncate",
        help=f"{about['on_too_long']} Default: %(default)s",
    )
    parser.add_argument(
        "--on-invalid", choices=("fail", "skip"), default="fail", help=f"{about['on_invalid']} Default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help=f"{about['seed']} Default: %(default)s")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the sources")
    parser.add_argument("--keep-duplicates", action="store_true", help="write rows with the same token ids again")
    parser.add_argument("--template", type=Path, metavar="FILE.jinja", help=about["template"])
    parser.add_argument(
        "--template-variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the chat template, its value in JSON, as enable_thinking=false; several times",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help=about["trust_remote_code"])
    parser.add_argument("--workers", type=int, help=f"{about['workers']} Default: the machine's cores")


def prepare_config(options: argparse.Namespace) -> PrepareConfig:
    """Raises ConfigError."""
    variables = {}
    for text in options.template_variable:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"--template-variable {text!r} is not of the form NAME=VALUE.")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    names = ("sources", "tokenizer", "output", "max_seq_len", "on_too_long", "on_invalid", "seed", "template")
    given = {name: getattr(options, name) for name in (*names, "trust_remote_code")}
    given |= {"shuffle": not options.no_shuffle, "deduplicate": not options.keep_duplicates}
    if options.workers is not None:
        given["workers"] = options.workers
    try:
        return PrepareConfig(**given, template_variables=variables)
    except ValueError as error:  # pydantic's
        raise ConfigError(f"The arguments of prepare are wrong: {error}") from error


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """The command `export`."""
    parser.add_argument("store", metavar="STORE", help="a verified store: its directory, or s3://BUCKET/PREFIX")
    parser.add_argument(
        "--endpoint-url", metavar="URL", help="of the bucket's store (default: AWS_ENDPOINT_URL_S3, or AWS)"
    )
    parser.add_argument("--to", required=True, choices=EXPORTS, help="whose files to write")
    parser.add_argument(
        "--out", type=Path, required=True, dest="output", metavar="DIR", help="folder; the same command resumes"
    )
    parser.add_argument(
        "--rows", metavar="START:STOP", help="a part, by place among the stored rows, as for training and evaluation"
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        metavar="IDS",
        help="specforge, speculators: write the mapping of a draft vocabulary of the ids that count most often",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the model, if it moved: its final norm is applied where the store has the states before it and the "
        "trainer wants those after it",
    )
