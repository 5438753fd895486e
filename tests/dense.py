"""Dense reference of everything that `laplace_ella` computes.

Explicit matrices, plain autograd loops, no code of the package. Index legend: N data,
C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

from math import log, pi

import torch
import torch.nn.functional as F


def jacobians(model, x, params=None):
    """Outputs (B, C) and Jacobians (B, C, P), one backward pass per output."""
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        f = model(x)
        Js = torch.stack([_flat_grad(output, params) for output in f.flatten()])
    return f.detach(), Js.detach().unflatten(0, f.shape)


def _flat_grad(output, params):
    grads = torch.autograd.grad(output, params, retain_graph=True, allow_unused=True)
    pairs = zip(grads, params, strict=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in pairs]
    return torch.cat([g.flatten() for g in grads])


def loss(f, y, likelihood):
    """Negative log-likelihood without noise and normaliser, as Laplace sums it."""
    if likelihood == "regression":
        return 0.5 * (f - y).square().sum()
    if likelihood == "multi_label":
        return F.binary_cross_entropy_with_logits(f, y, reduction="sum")
    return F.cross_entropy(f, y, reduction="sum")


def loss_hessian(f, likelihood):
    """Λ (B, C, C)."""
    if likelihood == "regression":
        return torch.eye(f.shape[-1], dtype=f.dtype).expand(len(f), -1, -1)
    if likelihood == "multi_label":
        return torch.diag_embed(f.sigmoid() * (1 - f.sigmoid()))
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def nystrom(rows, k):
    """Top-k directions V (P, k) and all eigenvalues (M,) from the rows J̃ (M, P)."""
    eigenvalues, U = torch.linalg.eigh(rows @ rows.T)
    eigenvalues, U = eigenvalues.flip(0), U.flip(1)
    return rows.T @ U[:, :k] / eigenvalues[:k].sqrt(), eigenvalues


def curvature(Js, Lam, V):
    """H = Σ φᵀΛφ (K, K)."""
    phi = Js @ V
    return torch.einsum("nck,ncd,ndl->kl", phi, Lam, phi)


def expand_prior(prior, params):
    """Diagonal D (P,) of a scalar, layerwise or diagonal prior precision."""
    sizes = [p.numel() for p in params]
    prior = torch.as_tensor(prior, dtype=torch.float64).reshape(-1)
    if len(prior) == 1:
        return prior.expand(sum(sizes))
    if len(prior) == len(sizes):
        return torch.cat([d.expand(n) for d, n in zip(prior, sizes, strict=True)])
    return prior


def subspace_covariance(H, V, D, factor=1.0):
    """Σ = V (H·factor + VᵀDV)⁻¹ Vᵀ (P, P): the paper's posterior."""
    return V @ torch.linalg.inv(factor * H + V.T @ (D[:, None] * V)) @ V.T


def marginal(Js, Sigma):
    """(B, C, C)."""
    return Js @ Sigma @ Js.mT


def joint(Js, Sigma):
    """(B·C, B·C)."""
    flat = Js.flatten(0, 1)
    return flat @ Sigma @ flat.T


def sampled_probs(f_mu, f_var, n_samples, seed=0):
    """Softmax averaged over draws from N(f_mu, f_var), by Cholesky of f_var."""
    C = f_mu.shape[-1]
    jitter = 1e-12 * f_var.mean().abs() * torch.eye(C, dtype=torch.float64)
    L = torch.linalg.cholesky(f_var + jitter)
    generator = torch.Generator().manual_seed(seed)
    eps = torch.randn(n_samples, *f_mu.shape, generator=generator, dtype=torch.float64)
    return (f_mu + torch.einsum("bcd,sbd->sbc", L, eps)).softmax(-1).mean(0)


def probit(f_mu, f_var):
    scale = (1 + pi / 8 * f_var.diagonal(dim1=1, dim2=2)).sqrt()
    return (f_mu / scale).softmax(-1)


def centered_probit(f_mu, f_var):
    """Probit of each logit against the mean of the others, by the contrast matrix."""
    C = f_mu.shape[-1]
    if C == 1:
        return torch.ones_like(f_mu)
    contrast = (torch.eye(C).double() * C - 1) / (C - 1)
    scale = 1 + pi / 8 * (contrast @ f_var @ contrast.T).diagonal(dim1=1, dim2=2)
    centred = f_mu - f_mu.mean(-1, keepdim=True)
    return (centred / scale.sqrt()).softmax(-1)


def bridge(f_mu, f_var, normalise=False):
    """Laplace bridge: zero-sum correction, then the mean of the Dirichlet."""
    C = f_mu.shape[-1]
    rows, total = f_var.sum(-1), f_var.sum((1, 2))
    mu = f_mu - rows * f_mu.sum(-1, keepdim=True) / total[:, None]
    var = f_var - rows[:, :, None] * rows[:, None, :] / total[:, None, None]
    var = var.diagonal(dim1=1, dim2=2)
    if normalise:
        scale = var.mean(-1, keepdim=True) / (C / 2) ** 0.5
        mu, var = mu / scale.sqrt(), var / scale
    alpha = (1 - 2 / C + mu.exp() / C**2 * (-mu).exp().sum(-1, keepdim=True)) / var
    return alpha / alpha.sum(-1, keepdim=True)


LINKS = {
    "probit": probit,
    "probit_centered": centered_probit,
    "bridge": bridge,
    "bridge_norm": lambda f_mu, f_var: bridge(f_mu, f_var, normalise=True),
    "mc": lambda f_mu, f_var: sampled_probs(f_mu, f_var, 100_000),
}


def kappa_eq21(J1, J2, J_train, Lam, rows, prior):
    """κ_ELLA (C, C) through Σ' (paper, Eq. 21), without eigenvectors."""
    cross = torch.einsum("mp,ncp->nmc", rows, J_train)  # J̃ Jᵀ, by example
    inner = (cross @ Lam @ cross.mT).sum(0) + prior * rows @ rows.T
    return J1 @ rows.T @ torch.linalg.inv(inner) @ rows @ J2.T


class Reference:
    """Everything about one problem, given the directions V (P, K); methods take the
    prior precision, scalar, layerwise or diagonal."""

    def __init__(self, case, V, sigma=1.0, temperature=1.0, prior_mean=0.0):
        self.model, self.params = case.model, case.params
        self.likelihood = case.likelihood
        self.V, self.sigma, self.temperature = V, sigma, temperature
        self.f, self.Js = jacobians(case.model, case.x, case.params)
        self.Lam = loss_hessian(self.f, case.likelihood)
        self.loss = loss(self.f, case.y, case.likelihood)
        self.H = curvature(self.Js, self.Lam, V)
        self.theta = torch.cat([p.detach().flatten() for p in case.params])
        self.delta = self.theta - prior_mean
        self.factor = 1 / torch.as_tensor(sigma).double() ** 2 / temperature

    def prior(self, prior):
        return expand_prior(prior, self.params)

    def precision(self, prior):
        """G = H·factor + VᵀDV (K, K)."""
        return self.factor * self.H + self.V.T @ (self.prior(prior)[:, None] * self.V)

    def covariance(self, prior, complement="drop"):
        """Σ (P, P) of the weights; (D + V H Vᵀ)⁻¹ with the prior outside the basis."""
        D = self.prior(prior)
        if complement == "drop":
            return subspace_covariance(self.H, self.V, D, self.factor)
        return torch.linalg.inv(
            torch.diag(D) + self.factor * self.V @ self.H @ self.V.T
        )

    def predict(self, x, prior, complement="drop"):
        """f_mu (B, C) and f_var (B, C, C)."""
        f, Js = jacobians(self.model, x, self.params)
        return f, marginal(Js, self.covariance(prior, complement))

    @property
    def log_likelihood(self):
        normaliser = 0.0
        if self.likelihood == "regression":
            sigma = torch.as_tensor(self.sigma, dtype=torch.float64)
            normaliser = self.f.numel() * (sigma.log() + 0.5 * log(2 * pi))
        return -self.loss * self.factor - normaliser

    def evidence(self, prior):
        """log p(D|θ̂) − ½[log det G − log det VᵀDV] − ½ (θ̂−μ)ᵀD(θ̂−μ)."""
        D, G = self.prior(prior), self.precision(prior)
        before = G - self.factor * self.H
        scatter = (self.delta * D) @ self.delta
        return self.log_likelihood - 0.5 * (G.logdet() - before.logdet() + scatter)


class Exact:
    """Linearised Laplace with every gradient and every weight, in float64, from outputs
    (n, C), Jacobians (n, C, P) and targets of the training data's rows, and θ̂ − μ₀.

    Nothing is cancelled that could be small: variances are squares of L⁻¹Jᵀ with
    LLᵀ = D + JᵀΛJ, log determinants are of the whitened I + D^{-1/2}JᵀΛJD^{-1/2}.
    """

    def __init__(self, f, Js, y, likelihood, delta):
        self.Js, self.delta, self.likelihood = Js, delta, likelihood
        self.n_rows = len(f)
        self.Lam = loss_hessian(f, likelihood)
        if likelihood == "regression":
            self.loss = 0.5 * (f - y).square().sum(0)  # (C,)
        else:
            self.loss = loss(f, y, likelihood)

    def curvature(self, sigma):
        """Σ JᵀΛJ (P, P), Λ = σ⁻² for each output in regression; else σ is one."""
        Lam = self.Lam * sigma.double() ** -2
        return torch.einsum("ncp,ncd,ndq->pq", self.Js, Lam, self.Js)

    def covariance(self, J, D, sigma):
        """J(D + JᵀΛJ)⁻¹Jᵀ (n, n) for rows J (n, P) and the prior D (P,)."""
        L = torch.linalg.cholesky(torch.diag(D) + self.curvature(sigma))
        root = torch.linalg.solve_triangular(L, J.T, upper=False)
        return root.T @ root

    def evidence(self, D, sigma):
        """Differentiable in D (P,) and sigma, one or one per output."""
        root = D.rsqrt()
        whitened = root[:, None] * self.curvature(sigma) * root
        ratio = torch.linalg.slogdet(torch.eye(len(D)).double() + whitened)[1]
        if self.likelihood == "regression":
            noise = sigma.double().expand(self.Js.shape[1])
            normaliser = self.n_rows * (noise.log() + 0.5 * log(2 * pi))
            log_lik = -(self.loss / noise**2 + normaliser).sum()
        else:
            log_lik = -self.loss
        return log_lik - 0.5 * (ratio + (self.delta**2 * D).sum())
