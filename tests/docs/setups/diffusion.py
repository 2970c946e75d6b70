"""A pipeline, and the LoRA of a checkpoint at the place that the page names."""

from gradbalance_diffusers.assembly import load_policy
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.tiny import load_tiny_sd3

pipe = load_tiny_sd3()
load_policy(load_config("tiny", []).model, seed=0).save_lora("runs/tiny/checkpoints/step-000040/default")
