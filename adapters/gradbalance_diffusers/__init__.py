"""Fine-tuning of Stable Diffusion 3 models on several rewards at once, with balanced gradients.

Import from the modules; nothing heavy is loaded before it is used.

* ``policy`` (``SD3Policy``), ``sampling``, ``scheduler``, ``embeddings``: the model in three roles, and its pictures.
* ``nft``, ``advantages``, ``timesteps``, ``old_policy``, ``ema``: the DiffusionNFT algorithm in small pieces.
* ``rewards`` (``RewardSet``, ``make_reward``), ``prompts``: what is asked for and how it is scored.
* ``trainer`` (``NFTTrainer``), ``evaluation``, ``checkpoint``, ``run_folder``, ``report``: a run.
* ``session`` (``distributed_session``), ``share``, ``first_rank``: the same run in several processes.
* ``config`` (``load_config``), ``cli``, ``assembly``: from a YAML file or a command line to the parts above.
* ``tiny``: the packaged tiny SD3.
"""
