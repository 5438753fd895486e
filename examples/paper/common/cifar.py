"""The CIFAR-10 set-up that several scripts share: splits, network, features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from common import ella, models
from common.data import Images, cifar10, moved
from laplace_ella import (
    ELLALaplace,
    FeatureCache,
    augmented_validation,
    prior_precision_from_weight_decay,
)

#: Images of the training file that are kept from fitting, for validation.
N_VALIDATION = 2000

#: The prior of the paper: 1/σ0² = N·(weight decay) = 5.
PAPER_PRIOR = prior_precision_from_weight_decay(
    models.CIFAR_WEIGHT_DECAY, models.CIFAR_TRAIN_SIZE
)

#: Weights of the last layer: 64 embeddings and a bias for each of 10 classes.
HEAD_WEIGHTS = 650

#: Strengths that `Cifar.strength` chooses from.
STRENGTHS = tuple(i / 8 for i in range(17))


@dataclass
class Cifar:
    """A network, its data and ELLA features of them.

    The networks were trained on the whole training set, so images kept from fitting
    the posterior are not new to them: 99.8 % are classified correctly, and no
    posterior wider than a point would be chosen on them. As the paper suggests,
    validation images are therefore changed, here just as much as makes them as hard
    for the network as new images are by its authors' account (`strength`).
    """

    args: Any
    network: str
    rank: int
    n_fit: int
    n_validation: int
    n_test: int
    seed: int = 0
    subsample_size: int = 2000

    @cached_property
    def model(self) -> models.ResNet:
        weights = getattr(self.args, "weights", None)
        return models.cifar_resnet(self.network, self.args.data_root, weights)

    @cached_property
    def _train_file(self) -> Images:
        return cifar10(self.args.data_root, "train")

    @property
    def train(self) -> Images:
        """All images that may be fitted."""
        return self._train_file[:-N_VALIDATION]

    @property
    def kept(self) -> Images:
        """Images kept from fitting, as they are."""
        return self._train_file[-N_VALIDATION:][: self.n_validation]

    @property
    def fit_images(self) -> Images:
        """The images whose curvature is summed: others for every seed.

        Seed 0 takes the order of the file, which is random already.
        """
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.train), generator=generator)
        if self.seed == 0:
            order = torch.arange(len(self.train))
        return self.train[order[: self.n_fit]]

    @cached_property
    def test(self) -> Images:
        return cifar10(self.args.data_root, "test")[: self.n_test]

    @cached_property
    def strength(self) -> float:
        """How far validation images are moved: to the published accuracy."""
        expected = models.CIFAR_RESNETS[self.network][2]
        kept = self._train_file[-N_VALIDATION:]

        def miss(strength: float) -> float:
            images = moved(kept, strength)
            predicted = ella.forward(self.model, images.x).argmax(-1)
            return abs((predicted == images.y).float().mean().item() - expected)

        path = self.folder.parent / "strength.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            best = (
                1.0 if self.args.smoke else min(tqdm(STRENGTHS, "strength"), key=miss)
            )
            torch.save(best, path)
        return torch.load(path, weights_only=True)

    @property
    def validation(self) -> Images:
        """Images kept from fitting, made as hard as new ones."""
        return moved(self.kept, self.strength)

    @cached_property
    def augmented(self) -> Images:
        """Images kept from fitting as `augmented_validation` changes them."""
        return Images(*augmented_validation(self.kept.loader()).dataset.tensors)

    def images(self, which: str) -> Images:
        """Images by name: those to 'fit', to choose settings on, or to 'test'."""
        names = {"fit": "fit_images"}
        return getattr(self, names.get(which, which))

    # ELLA

    @property
    def folder(self) -> Path:
        name = f"M{self.subsample_size}_K{self.rank}_seed{self.seed}"
        return self.args.cache_dir / "cifar10" / self.network / name

    @cached_property
    def la(self) -> ELLALaplace:
        return ella.fit_basis(
            self.model,
            self.train,
            self.folder / "ella.pt",
            n_eigenvalues=self.rank,
            subsample_size=self.subsample_size,
            seed=self.seed,
            prior_precision=PAPER_PRIOR,
        )

    def features(self, which: str, skipped_shards: int = 0) -> FeatureCache:
        """Features of 'fit', 'validation', 'augmented' or 'test', without those in the
        first files."""
        return ella.cached_features(
            self.la,
            self.images(which),
            self.folder / which,
            residual=which != "fit",  # curvature needs features only
            skipped_shards=skipped_shards,
        )

    def head_study(
        self, embedded: dict[str, Images]
    ) -> tuple[ella.Study, dict[str, FeatureCache]]:
        """ELLA of the last layer and features of what it sees of the images to 'fit',
        and of others. With all directions it is the layer's full posterior."""
        return ella.last_layer_study(
            self.model.linear,
            embedded,
            self.folder,
            n_eigenvalues=min(HEAD_WEIGHTS, self.subsample_size),
            subsample_size=self.subsample_size,
            prior_precision=PAPER_PRIOR,
        )

    def embeddings(self, which: str, images: Images) -> torch.Tensor:
        """What the last layer sees of images, `(N, 64)`, kept in a file."""
        path = self.folder.parent / f"embeddings_{which}_{len(images)}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(ella.forward(self.model.embed, images.x), path)
        return torch.load(path, weights_only=True)
