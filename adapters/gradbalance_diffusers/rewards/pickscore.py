"""PickScore: how much people would like a picture for its prompt."""

from torch import Tensor

from .images import resized_with_pil
from .similarity import CLIPSimilarity


class PickScore(CLIPSimilarity):
    r"""Human preference for a picture given its prompt (Kirstain et al. 2023, arXiv 2305.01569).

    $$R = e^{t} \cos(f(x), g(c)) / 26$$

    with the features f, g and the logit scale $e^{t}$ of a CLIP ViT-H/14 fine-tuned on choices of users; the divisor,
    as in DiffusionNFT and flow_grpo, brings the score near 1. Pictures are prepared by CLIP's own steps on 8-bit
    pixels. Typical values are 0.75 to 0.95. Arguments are those of :class:`CLIPSimilarity`.
    """

    name = "pickscore"
    published = "yuvalkirstain/PickScore_v1"
    divisor = 26

    def prepare(self, images: Tensor) -> Tensor:
        """Resized and cropped as 8-bit pictures."""
        return resized_with_pil(images, self._clip.image_size)
