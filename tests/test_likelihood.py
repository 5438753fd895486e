"""Sampled curvature: unbiased, and good for confident networks."""

from __future__ import annotations

import pytest
import torch

from laplace_ella.posterior.likelihood import Family, curvature_root, sample_cotangents

LOGITS = {
    "even": torch.tensor([[0.1, -0.2, 0.0, 0.3], [1.0, 0.0, -1.0, 0.5]]),
    "confident": torch.tensor([[9.0, 0.0, -3.0, 1.0], [-8.0, 2.0, 14.0, 0.0]]),
    "certain": torch.tensor([[200.0, 0.0, 0.0, 0.0], [0.0, 0.0, -300.0, 900.0]]),
}


def hessian(f, family):
    """Λ (B, C, C), entry by entry, without the cancellation of p − p²."""
    C = f.shape[-1]
    if family is Family.GAUSSIAN:
        return torch.eye(C, dtype=f.dtype).expand(len(f), C, C)
    if family is Family.BERNOULLI:
        return torch.diag_embed(f.sigmoid() * (-f).sigmoid())
    p = f.softmax(-1)
    others = p @ (1 - torch.eye(C, dtype=f.dtype))
    return torch.stack(
        [
            torch.stack(
                [p[:, i] * (others[:, i] if i == j else -p[:, j]) for j in range(C)], -1
            )
            for i in range(C)
        ],
        1,
    )


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("family", Family)
def test_cotangents_have_the_moments(family, logits):
    """E[ccᵀ] = Λ and E[c] = 0, within the error of so many samples."""
    f, n = LOGITS[logits].double(), 200_000
    c = sample_cotangents(f, family, n, torch.Generator().manual_seed(0))
    assert torch.isfinite(c).all()
    Lam = hessian(f, family)
    scale = Lam.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)[:, None]
    torch.testing.assert_close(
        c @ c.mT / scale[..., None], Lam / scale[..., None], atol=0.02, rtol=0
    )
    mean = c.sum(-1) / n**0.5 / scale.sqrt()
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=0.02, rtol=0)


@pytest.mark.parametrize("family", [Family.CATEGORICAL, Family.BERNOULLI])
def test_one_sample_is_enough_for_a_confident_network(family):
    """Labels drawn from p miss nearly all the curvature of confident predictions."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    f[:, 0] += 7
    phi = torch.randn(400, 3, 5, generator=generator, dtype=torch.float64)

    def error(cotangents):
        psi = cotangents.mT @ phi  # (R, 1, K)
        sampled = torch.einsum("rsk,rsl->kl", psi, psi)
        root = curvature_root(f, phi, family)
        exact = torch.einsum("rck,rcl->kl", root, root)
        return float((sampled - exact).norm() / exact.norm())

    p = family.probabilities(f)
    if family is Family.CATEGORICAL:
        labels = torch.multinomial(p, 1, generator=generator)
        labels = torch.nn.functional.one_hot(labels[:, 0], 3)
    else:
        labels = torch.rand(p.shape, generator=generator) < p
    by_labels = error((labels.double() - p).unsqueeze(-1))
    ours = error(sample_cotangents(f, family, 1, generator))
    assert ours < 0.3
    if family is Family.CATEGORICAL:
        assert ours < by_labels / 2
