"""CLIPScore: does a picture show what its prompt says?"""

from torch import Tensor

from .images import cropped
from .similarity import CLIPSimilarity


class CLIPScore(CLIPSimilarity):
    r"""Agreement of a picture with its prompt by CLIP ViT-L/14 (Radford et al. 2021, arXiv 2103.00020).

    $$R = e^{t} \cos(f(x), g(c)) / 100$$

    with features f, g and the logit scale $e^{t}$, which is 100 for OpenAI's models: the score is the cosine, without
    the factor 2.5 and the cut at 0 of Hessel et al. (2021). Pictures are resized in floating point by the bilinear
    filter and centre cropped, as flow_grpo does. Typical values are 0.2 to 0.4. Arguments are those of
    :class:`CLIPSimilarity`.
    """

    name = "clipscore"
    published = "openai/clip-vit-large-patch14"
    divisor = 100

    def prepare(self, images: Tensor) -> Tensor:
        """Resized and cropped in floating point."""
        return cropped(images.to(self._clip.device), self._clip.image_size)
