"""The stand-in's vision tower: modules of the declared names, whose parameters are added by the model."""

import torch
from torch import nn

from reference.vision import aligner, vision


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, patches, grids):
        return vision(self.config, dict(self.named_parameters()), patches, grids)


class Aligner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, features, grids):
        return aligner(self.config, dict(self.named_parameters()), features, grids)


def place(model, h, images):
    """Features and delimiters in the places of the images: bf16 [1,T,D]; and the mask of image tokens, or None."""
    mask = None
    for image in images or ():
        grids = torch.tensor([[image.n_vit_h, image.n_vit_w]])
        rows = iter(model.aligner(model.vision(image.patches, grids), grids))
        delimiters = {0: model.image_start, 2: model.image_newline, 3: model.image_end}
        places = range(image.start, image.start + len(image.types))
        mask = torch.zeros(h.shape[:2], dtype=torch.bool) if mask is None else mask
        for place, kind in zip(places, image.types.tolist(), strict=True):
            h[0, place] = next(rows) if kind == 1 else delimiters[kind]
            mask[0, place] = True
    return h, mask
