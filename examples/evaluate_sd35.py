"""Compare a base model, checkpoints and LoRAs on the same prompts: pictures, metrics, a table, a report.

    python examples/evaluate_sd35.py base runs/demo                       # a run against its base, as it was trained
    python examples/evaluate_sd35.py --preset sd35-medium base cfg=base@4.5 marble=runs/marble sum=runs/sum
    python examples/evaluate_sd35.py --preset sd35-medium base nft=org/some-lora --prompts-per-source all
    python examples/evaluate_sd35.py --only score                          # later, or on another machine
    torchrun --nproc_per_node 8 examples/evaluate_sd35.py base runs/demo   # pictures on 8 GPUs, scores on one

`--help` lists the rest. The same command goes on where it was stopped.
"""

from __future__ import annotations

import sys

from gradbalance import GradBalanceError
from gradbalance.distributed import Ranks
from gradbalance_diffusers.assembly import evaluation_prompts
from gradbalance_diffusers.evaluating.cli import Arguments, parse_arguments
from gradbalance_diffusers.evaluating.folder import EvaluationFolder
from gradbalance_diffusers.evaluating.generate import generate
from gradbalance_diffusers.evaluating.report import write_results
from gradbalance_diffusers.evaluating.score import score
from gradbalance_diffusers.session import distributed_session


def main() -> None:
    arguments = parse_arguments()
    with distributed_session(arguments.config) as ranks:
        evaluate(arguments, ranks)


def evaluate(arguments: Arguments, ranks: Ranks) -> None:
    config, problems = arguments.config, {}
    folder = EvaluationFolder(arguments.output)
    if "generate" in arguments.steps:
        if ranks.rank == 0:
            folder.add_metrics(arguments.metrics)  # for a machine that only scores
        generate(
            folder,
            arguments.specs(),
            evaluation_prompts(config),
            model=config.model,
            sampling=arguments.sampling(),
            samples=arguments.samples,
            batch_size=config.sampling.batch_size,
            decode_batch_size=config.sampling.decode_batch_size,
            ranks=ranks,
        )
    if ranks.rank > 0:  # one process scores
        return
    if "score" in arguments.steps:
        problems = score(folder, arguments.metrics, arguments.names)
        for name, problem in problems.items():
            print(f"{name}: {problem}", file=sys.stderr)
    if "report" in arguments.steps:
        print(write_results(folder, arguments.names))
    if problems:
        raise SystemExit(f"Not scored completely: {', '.join(problems)}. The same command asks for the rest again.")


if __name__ == "__main__":
    try:
        main()
    except GradBalanceError as error:  # said for the user; a traceback would bury it
        raise SystemExit(f"{type(error).__name__}: {error}") from None
