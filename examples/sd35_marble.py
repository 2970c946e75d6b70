"""Fine-tune Stable Diffusion 3.5 on several rewards at once with MARBLE (arXiv 2605.06507).

    python examples/sd35_marble.py                                  # the tiny SD3 shipped with the package, on a CPU
    python examples/sd35_marble.py --preset sd35-medium --dry-run   # is everything there for SD3.5 Medium on this GPU?
    python examples/sd35_marble.py --preset sd35-medium             # train it
    python examples/sd35_marble.py --preset sd35-medium model.path=/models/sd3.5-medium
    python examples/sd35_marble.py --balance weighted-sum           # a baseline, everything else equal
    torchrun --nproc_per_node 8 examples/sd35_marble.py --preset sd35-medium      # the same training on 8 GPUs

`--help` lists the rest; `section.key=value` overrides any field of the preset.
"""

from __future__ import annotations

from pathlib import Path

from gradbalance import GradBalanceError
from gradbalance.distributed import Ranks
from gradbalance_diffusers.assembly import (
    configure_torch,
    evaluation_prompts,
    load_policy,
    load_rewards,
    make_optimizer,
    training_prompts,
)
from gradbalance_diffusers.cli import Arguments, parse_arguments
from gradbalance_diffusers.dry_run import dry_run
from gradbalance_diffusers.estimate import estimate_table, present_gpu
from gradbalance_diffusers.first_rank import open_run_folder
from gradbalance_diffusers.model_shapes import shapes_of
from gradbalance_diffusers.run_folder import check_run_folder
from gradbalance_diffusers.session import distributed_session
from gradbalance_diffusers.trackers import require_tracker
from gradbalance_diffusers.trainer import NFTTrainer


def main() -> None:
    arguments = parse_arguments()
    with distributed_session(arguments.config) as ranks:
        configure_torch(arguments.config.run)
        if arguments.dry_run:
            checks = dry_run(arguments.config, resume=arguments.resume, overwrite=arguments.overwrite, ranks=ranks)
            print(checks.table())
            raise SystemExit(1 if checks.faults and ranks.rank == 0 else 0)  # its list has the faults of all
        train(arguments, ranks)


def train(arguments: Arguments, ranks: Ranks) -> None:
    config = arguments.config
    # What can be wrong is looked at before the folder is touched, and what takes no time before what takes minutes.
    if ranks.rank == 0:
        check_run_folder(Path(config.run.folder), resume=arguments.resume, overwrite=arguments.overwrite)
        for tracker in config.run.trackers:
            require_tracker(tracker)
    prompts, held_out = training_prompts(config), evaluation_prompts(config)
    rewards = load_rewards(config)
    policy = load_policy(config.model, seed=config.run.seed, mixed_precision=config.run.mixed_precision)
    with open_run_folder(config.run.folder, ranks, resume=arguments.resume, overwrite=arguments.overwrite) as folder:
        print(estimate_table(shapes_of(policy, config.model), config, gpu=present_gpu(), gpus=ranks.size))
        trainer = NFTTrainer(
            config,
            policy=policy,
            rewards=rewards,
            prompts=prompts,
            evaluation_prompts=held_out,
            optimizer=make_optimizer(config.optimizer, policy),
            folder=folder,
            ranks=ranks,
        )
        if arguments.resume:
            trainer.resume()
        folder.write_config(config)  # not before: a change that a checkpoint refuses is not that of the run
        trainer.fit()
        print(f"Report: {folder.path / 'report.html'}")


if __name__ == "__main__":
    try:
        main()
    except GradBalanceError as error:  # said for the user; a traceback would bury it
        raise SystemExit(f"{type(error).__name__}: {error}") from None
