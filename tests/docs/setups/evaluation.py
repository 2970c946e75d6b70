"""A folder with made-up scores of two models, as the page's commands would leave one."""

from PIL import Image

from gradbalance_diffusers.evaluating.folder import EvaluationFolder, Score
from gradbalance_diffusers.evaluating.work import Picture
from gradbalance_diffusers.prompts import Prompt
from gradbalance_diffusers.sections import RewardConfig

folder = EvaluationFolder("runs/evaluation")
folder.write_prompts([Prompt('a sign "42"', "ocr"), Prompt('a sign "17"', "ocr")])
folder.add_metrics([RewardConfig(name="ocr")])
settings = {
    "model.path": "tiny", "model.dtype": "float32", "sampling.steps": 4, "sampling.solver": "euler",
    "sampling.guidance_scale": 1.0, "sampling.width": 16, "sampling.height": 16,
}  # fmt: skip
for model, scores in {"base": (0.25, 0.5), "demo": (0.75, 0.5)}.items():
    folder.add_model(model, settings, {"kind": "base"})
    for prompt in range(len(scores)):
        path = folder.image_path(model, Picture(prompt, 0))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(path)
    folder.append_scores(model, "ocr", [Score(Picture(prompt, 0), score) for prompt, score in enumerate(scores)])
