"""The command line: `python -m flows COMMAND`."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows import dataset_options, lineage, places, services
from flows.summary import as_lines, count_states
from tasks.config import describe_config, load_config
from tasks.errors import DrillcoreError, SetupError, SpaceError
from tasks.files import human_bytes

DESCRIPTION = """\
Extracts the hidden states of a large language model from a served SGLang engine, checks, stores and traces them.

A config names the dataset, the model, the layers and the output; deployments/configs/ has examples. The same command
started again resumes: what is stored already is never extracted twice.
"""
EXIT_CODES = "exit codes: 0 all well, 1 the run failed or the data did not pass, 2 wrong input (nothing was started)"

LINEAGE = "Say which extraction fed which drafter, or register a drafter that was trained elsewhere."
PATCH_ACTIONS = {
    "apply": "Make the plugin ready: check that it fits this SGLang and, with --interpreter, install it there.",
    "verify": "Check version, functions and, with --interpreter, every byte and that the interpreter finds the plugin.",
    "status": "Say what there is: the SGLang, the plugin, the proofs.",
    "revert": "Undo an install; the environment is then as before.",
    "fingerprint": "Print the line that adds an SGLang wheel's version to patches/manifest.json.",
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except DrillcoreError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        print("What was committed stays. Mend the cause; the same command resumes.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. What was committed stays; the same command resumes.", file=sys.stderr)
        return 130


def run_extract(options: argparse.Namespace) -> int:
    return _extract(options, deep=options.deep)


def run_fleet(options: argparse.Namespace) -> int:
    from tasks.fleet.settings import load_fleet

    config = load_config(options.config, options.set)
    fleet = load_fleet(options.fleet, options.node or [], options.partitions)
    _quiet_prefect(options.verbose)
    if services.find_api() is None:
        raise SetupError(
            "A fleet needs the Prefect API that its nodes' workers ask for work: name it (PREFECT_API_URL, or a "
            "profile), or start one with `python -m flows ui`."
        )
    from flows.fleet import extract_fleet
    from flows.run import run_with_prefect

    print(f"\n{run_with_prefect(extract_fleet, config, None, fleet=fleet).text()}")
    return 0


def run_retry_failed(options: argparse.Namespace) -> int:
    return _extract(options, only_failed=True)


def _extract(options: argparse.Namespace, only_failed: bool = False, deep: bool = False) -> int:
    config = load_config(options.config, options.set)
    _quiet_prefect(options.verbose)
    from flows.extract import extract
    from flows.run import run_with_prefect

    summary = run_with_prefect(extract, config, options.prefect_port, only_failed=only_failed, deep=deep)
    pages = f"{os.path.relpath(sys.executable)} -m flows ui"
    urls = (
        f"Prefect http://{services.HOST}:{services.PREFECT_PORT}, MLflow http://{services.HOST}:{services.MLFLOW_PORT}"
    )
    print(f"\n{summary.text(options.config)}\n{as_lines([('pages', pages), ('', urls)])}")
    return 0


def run_prepare(options: argparse.Namespace) -> int:
    config = dataset_options.prepare_config(options)
    _quiet_prefect(options.verbose)
    from flows.prepare import prepare
    from flows.run import run_with_prefect

    print(f"\n{run_with_prefect(prepare, config, options.prefect_port).text()}")
    return 0


def run_export(options: argparse.Namespace) -> int:
    _quiet_prefect(options.verbose)
    from flows.export import ExportConfig, export
    from flows.run import run_with_prefect

    config = ExportConfig(**{name: getattr(options, name) for name in ExportConfig.model_fields})
    print(f"\n{run_with_prefect(export, config, options.prefect_port).text()}")
    return 0


def _quiet_prefect(verbose: bool) -> None:
    """Before Prefect is imported. Its page gets every line."""
    # The terminal gets the steps, the bar and the summary, unless more is asked for.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "INFO" if verbose else "CRITICAL")
    # Where the API is away, Prefect's client shows every event that it cannot send; run_with_prefect says it once.
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")


def run_plan(options: argparse.Namespace) -> int:
    from tasks.preflight import check_space, describe, run_preflight

    config = load_config(options.config, options.set)
    preflight = run_preflight(config, space=False, credentials=places.credentials_now(config.s3))
    print(as_lines(describe(preflight, options.rate)))
    try:
        check_space(preflight)
    except SpaceError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    print("  There is room for it. Nothing was started.")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from tasks.recheck import verify_output
    from tasks.report import report_path
    from tasks.verification import read_outcome

    store = places.store_of(options)
    try:
        verified = verify_output(
            *(store, options.dataset, options.fresh, options.repair),
            show=lambda progress: print(f"  verify     {progress.text()}", file=sys.stderr, flush=True),
        )
    finally:
        if options.json and (outcome := read_outcome(store)):
            print(json.dumps(asdict(outcome), indent=1))
    if not options.json:
        passed = f"{verified.tokens:,} tokens, {verified.shards:,} shards, {human_bytes(verified.bytes)}"
        lines = [("passed", passed), ("rows", count_states(verified.rows)), ("digest", verified.digest)]
        print(as_lines([*lines, ("report", str(report_path(store)))]))
    return 0


def run_record(options: argparse.Namespace) -> int:
    from tasks.config import LineageConfig
    from tasks.lineage.record import record_extraction
    from tasks.store.layout import read_extraction

    store = places.store_of(options)
    found = read_extraction(store)
    given = {name: value for name in LineageConfig.model_fields if (value := getattr(options, name)) is not None}
    config = LineageConfig(**((found["config"]["lineage"] if found else {}) | given))
    run_id = record_extraction(store, config, services.mlflow_uri(), services.mlflow_artifacts())
    print(f"  MLflow run {run_id}")
    return 0


def run_ui(options: argparse.Namespace) -> int:
    services.serve_pages(options.prefect_port, options.mlflow_port)
    return 0


def run_config(options: argparse.Namespace) -> int:
    print(describe_config())
    return 0


def run_server_command(options: argparse.Namespace) -> int:
    from tasks.model import capture_layers, read_model
    from tasks.patching import check_signatures, find_installation
    from tasks.server.launch import shell_commands

    config = load_config(options.config, options.set)
    layers = capture_layers(read_model(config.model.path), config.capture)
    installation = find_installation(config.server.interpreter)
    check_signatures(installation)
    print("\n".join(shell_commands(config, installation, layers)))
    return 0


def run_patch(options: argparse.Namespace) -> int:
    from flows import patch

    if options.action == "fingerprint":
        lines, unseen = patch.fingerprint(options.wheels)
        print("\n".join(lines))
        if unseen:
            print(as_lines(unseen), file=sys.stderr)
    elif options.action == "apply":
        print(as_lines(patch.apply(options.interpreter, options.force)))
    else:
        action = {"verify": patch.verify, "status": patch.status, "revert": patch.revert}[options.action]
        print(as_lines(action(options.interpreter)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, config: bool = False) -> Any:
        child = commands.add_parser(name, help=text.splitlines()[0], description=text, epilog=EXIT_CODES)
        child.set_defaults(run=run)
        if config:
            child.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the extraction's config")
            child.add_argument(
                "--set",
                action="append",
                metavar="SECTION.FIELD=VALUE",
                help="a value that wins over the config's; may be given several times",
            )
        return child

    extract = command("extract", run_extract, "Extract, verify and record; resume what was begun.", config=True)
    extract.add_argument(
        "--deep",
        action="store_true",
        help="before resuming, read every shard that is there and compare its checksum, not only its size; the rows of "
        "damaged ones are extracted again",
    )
    retry = command(
        "retry-failed",
        run_retry_failed,
        "Try the rows that failed once more, also those that would fail again by themselves; leave those never tried.",
        config=True,
    )
    fleet = command(
        "fleet",
        run_fleet,
        "Extract with several nodes into one store, by their Prefect workers; resume what was begun.",
        config=True,
    )
    fleet.add_argument(
        "--node",
        action="append",
        metavar="QUEUE",
        help="a node, by the work queue that its worker polls (`prefect worker start --pool drillcore --work-queue "
        "QUEUE --limit 1`); once for each",
    )
    fleet.add_argument("--fleet", type=Path, metavar="FLEET.yaml", help="nodes with settings of their own, and limits")
    fleet.add_argument("--partitions", type=int, help="partitions, at least (default: as many as nodes)")
    fleet.add_argument("--verbose", action="store_true", help="show every log line, not only the steps")
    prepare = command(
        "prepare", run_prepare, "Make a dataset of conversations or token ids: tokenize, mask, merge, shuffle."
    )
    dataset_options.add_prepare_options(prepare)
    export = command("export", run_export, "Write a verified store as the files that a trainer reads.")
    dataset_options.add_export_options(export)
    for child in (extract, retry, prepare, export):
        child.add_argument("--verbose", action="store_true", help="show every log line, not only the steps")
        child.add_argument(
            "--prefect-port", type=int, help="port of the Prefect server, if one is started (default 4200)"
        )
    child = command("plan", run_plan, "Check everything that needs no server and print the plan.", config=True)
    child.add_argument("--rate", type=float, metavar="TOKENS_PER_SECOND", help="print how long it takes at this rate")
    child = command("verify", run_verify, "Check a finished or unfinished output against its books and its dataset.")
    places.add_place(child)
    child.add_argument("--dataset", type=Path, help="the dataset, if it moved since the extraction")
    child.add_argument(
        "--repair",
        action="store_true",
        help="put what is damaged or suspicious back into the plan: damaged shards and single rows are withdrawn, and "
        "the next `extract` extracts just these",
    )
    child.add_argument(
        "--fresh",
        action="store_true",
        help="read everything, also what an unfinished verification of the last three days has read already",
    )
    child.add_argument("--json", action="store_true", help="print all that was found as JSON")
    child = command("record", run_record, "Record a verified output in MLflow, if that failed before.")
    places.add_place(child)
    child.add_argument("--tracking-uri", help="MLflow tracking URI (default: as the extraction's config says)")
    child.add_argument("--experiment", help="MLflow experiment (default: as the extraction's config says)")
    lineage.add_actions(command("lineage", lineage.run_lineage, LINEAGE), EXIT_CODES)
    child = command("ui", run_ui, "Serve the Prefect and MLflow pages of this machine until interrupted.")
    child.add_argument("--prefect-port", type=int, default=services.PREFECT_PORT, help="default: %(default)s")
    child.add_argument("--mlflow-port", type=int, default=services.MLFLOW_PORT, help="default: %(default)s")
    command("config", run_config, "Print every field of a config with its meaning.")
    command(
        "server-command",
        run_server_command,
        "Print the shell command that starts each server an attached extraction with this config needs.",
        config=True,
    )
    child = command("patch", run_patch, "Check, install or remove the capture plugin.")
    _add_patch_actions(child.add_subparsers(dest="action", metavar="ACTION", required=True))
    return parser


def _add_patch_actions(actions: Any) -> None:
    for name, text in PATCH_ACTIONS.items():
        child = actions.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        if name == "fingerprint":
            child.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL", help="an SGLang wheel")
            continue
        child.add_argument(
            "--interpreter",
            metavar="PYTHON",
            help="the Python of an environment in which somebody starts servers himself: the plugin is installed there "
            "(default: this Python, whose managed servers get the plugin through PYTHONPATH)",
        )
        if name == "apply":
            child.add_argument(
                "--force",
                type=Path,
                metavar="CONFIG.yaml",
                help="accept an SGLang that the manifest does not list, if a server of it passes the probe: it is "
                "started by this config",
            )


if __name__ == "__main__":
    logging.getLogger("tasks").addHandler(logging.StreamHandler())  # warnings of the core; Prefect prints its own
    code = main()
    if "flows.run" in sys.modules:
        from flows.run import end_process

        end_process(code)
    sys.exit(code)
