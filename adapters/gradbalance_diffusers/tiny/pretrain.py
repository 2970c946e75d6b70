"""Builds and pre-trains the packaged tiny SD3: ``python -m gradbalance_diffusers.tiny.pretrain --output DIR``.

Three stages, each from a fixed seed:

1. autoencoder on rendered pictures;
2. transformer and both text encoders from scratch by flow matching, with the timestep shift of SD3 from the first
   step and right captions only, on a pool of pictures encoded once;
3. a short stage in which some captions are wrong: all digits of half the signs, one fact of a few geneval and general
   prompts (`WRONG_SHARES`). The model can draw what is asked after stage 2; stage 3 only dilutes its conditional
   distribution, as web captions dilute that of a large model. It therefore starts mediocre on purpose: reinforcement
   learning has something to sharpen.

One batch in eight of stage 3 carries the zeros that the pipeline puts in the place of a missing T5 encoder, so that the
pipeline's default `max_sequence_length` works too, if slower than 0.

The packaged weights come from this recipe with four changes on the way. The first 3,000 steps of stage 2 drew the
sources 0.45 : 0.45 : 0.10, the tags as in the prompt lists, and pairs of objects in any order of cells; the digits were
bound by then and the pairs were not, hence the mix of `data.py` and the order of cells of `scene.py`. Stage 2 was
stopped at step 4,500 of its schedule of 6,000. Its averages used a decay of 0.998. At
step 3,000 the token ids were numbered anew, and the learned embeddings with them. A run of the script from scratch
with ``--steps 4500`` comes out much the same (docs/tiny.md).

A run that was interrupted continues from its last checkpoint when it is started again with the same arguments.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import distributed, multiprocessing
from tqdm import tqdm

from gradbalance_diffusers.tiny.data import draw_pool
from gradbalance_diffusers.tiny.evaluate import evaluation_rows, picture_grid, sample_rows, score_specialists
from gradbalance_diffusers.tiny.models import build_pipeline, build_vae
from gradbalance_diffusers.tiny.package import save_pipeline
from gradbalance_diffusers.tiny.tokenizer import build_tokenizer
from gradbalance_diffusers.tiny.train_flow import FlowTrainer, Stage
from gradbalance_diffusers.tiny.train_vae import encode, train_vae

VAE_POOL = 12_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.workers)
    work: Path = options.output / "work"
    work.mkdir(parents=True, exist_ok=True)
    _autoencoder(work / "vae", options)
    if options.workers == 1:
        _flow(work, options)
    else:
        # One thread in each of two processes is twice as fast here as two threads in one: the operations are small.
        rendezvous = (work / "rendezvous").absolute()
        rendezvous.unlink(missing_ok=True)
        multiprocessing.spawn(_worker, (work, options, rendezvous), nprocs=options.workers)


def _worker(rank: int, work: Path, options: argparse.Namespace, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.workers)
    _flow(work, options)
    distributed.destroy_process_group()


def _autoencoder(path: Path, options: argparse.Namespace) -> None:
    if (path / "config.json").exists():
        return
    torch.manual_seed(options.seed)
    vae = build_vae()
    _, pictures = draw_pool(min(VAE_POOL, options.pool), seed=options.seed + 1)
    psnr = train_vae(vae, pictures, options.vae_steps, options.seed)
    tqdm.write(f"autoencoder: {psnr:.1f} dB")
    vae.save_pretrained(path)


def _flow(work: Path, options: argparse.Namespace) -> None:
    vae = AutoencoderKL.from_pretrained(work / "vae").eval()
    rows, pictures = draw_pool(options.pool, seed=options.seed + 2)
    latents = encode(vae, pictures)
    torch.manual_seed(options.seed)
    pipeline = build_pipeline(vae, build_tokenizer())
    trainer = FlowTrainer(pipeline, rows, latents, options.seed)
    test = evaluation_rows(options.eval_size)

    def report(step: int) -> None:
        samples = sample_rows(pipeline, test)
        scores = score_specialists(samples, test)
        tqdm.write(f"step {step}: " + " ".join(f"{name} {value:.3f}" for name, value in scores.items()))
        picture_grid(samples, columns=min(16, len(samples))).save(work / f"samples-{step:06d}.png")

    stages = (
        Stage("flow", 0, options.steps, options.rate),
        Stage(
            "dilute",
            options.steps,
            options.dilute_steps,
            options.dilute_rate,
            True,
            options.placeholder_share,
        ),
    )
    for stage in stages:
        trainer.train(stage, work / f"{stage.name}.pt", options.every, report)
    if trainer.rank == 0:
        trainer.swap_average()
        save_pipeline(pipeline, options.output / "sd3")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gradbalance_diffusers.tiny.pretrain", description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for sd3/ (the pipeline) and work/ (checkpoints)"
    )
    parser.add_argument("--vae-steps", type=int, default=1_800)
    parser.add_argument("--steps", type=int, default=6_000, help="steps of stage 2")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of stage 2")
    parser.add_argument("--dilute-steps", type=int, default=400, help="steps of stage 3")
    parser.add_argument("--dilute-rate", type=float, default=1e-3, help="peak learning rate of stage 3")
    parser.add_argument("--placeholder-share", type=float, default=0.125, help="share of stage 3 with a T5 placeholder")
    parser.add_argument("--pool", type=int, default=32_000, help="pictures of stages 2 and 3")
    parser.add_argument("--eval-size", type=int, default=64, help="test prompts of each specialist in a report")
    parser.add_argument("--every", type=int, default=500, help="steps between reports and checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread that share the work")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
