"""Compare a base model, checkpoints and LoRAs on the same prompts and seeds: generate, score, report.

The three steps share a folder and nothing else, so each can run on a machine of its own:

* :func:`~gradbalance_diffusers.evaluating.generate.generate` writes one picture per prompt and sample,
* :func:`~gradbalance_diffusers.evaluating.score.score` writes one number per picture and metric,
* :func:`~gradbalance_diffusers.evaluating.report.write_results` turns them into tables and a page.
"""
