"""Models that people bring: every way of differentiating, checked by differences.

Every architecture is fitted and predicts through `Laplace(...)`, and is compared with
plain autograd loops and with finite differences of the model along the directions,
φ(x) z = (f(x; θ + εVz) − f(x; θ − εVz)) / 2ε, in float64. Which rungs of the ladder it
supports is written next to it, as measured; some operators have other kernels, with
other derivatives, in float32, and are there twice.

Index legend: N data, C outputs, P parameters, K rank, B batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from laplace_ella import RankWarning
from tests import dense
from tests.cases import CNN, Sequence, TiedModel, mlp
from tests.fitting import assert_close

K = 3
C = 2
MEASURED_WITH = (2, 15)
"""The torch release on which the rungs were measured; others may support others."""


# --- problems ----------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """How to build a model with its inputs, and which rungs it supports.

    `forward` is "vmap" if forward mode takes all tangents in one pass, "loop" if it
    takes one after the other, None if some operator has no forward derivative. `rows`
    is "vmap" if rows and Jacobians come from batched backward passes, "loop" if only
    one backward pass per example works.
    """

    build: Callable[[], tuple[nn.Module, Any]]
    forward: str | None = "vmap"
    double_vjp: bool = True
    rows: str = "vmap"
    likelihood: str = "classification"
    dtype: torch.dtype = torch.float64


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(**rungs):
    """Enter a builder of (model, inputs of N + B examples) under its own name."""

    def enter(build):
        ARCHITECTURES[build.__name__] = Architecture(build, **rungs)
        return build

    return enter


def take(x, index):
    """Examples of a tensor or a mapping."""
    return {k: v[index] for k, v in x.items()} if isinstance(x, dict) else x[index]


def cast(x, dtype):
    """Floating-point tensors of a tensor or mapping in another dtype."""
    if isinstance(x, dict):
        return {k: cast(v, dtype) for k, v in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


class Problem:
    """One architecture with data, in eval mode, and the same model in float64.

    A dtype of None leaves the parameters as they were built.
    """

    N = 3

    def __init__(self, build, likelihood="classification", dtype=torch.float64):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model, x = build()
        self.model, self.likelihood = model.to(dtype).eval(), likelihood
        self.exact = model
        if dtype != torch.float64:
            self.exact = copy.deepcopy(model).double()
        x = cast(x, dtype or torch.float32)
        self.x, self.x_test = take(x, slice(self.N)), take(x, slice(self.N, None))
        self.y = torch.arange(self.N) % C
        if likelihood == "regression":
            self.y = F.one_hot(self.y, C).to(dtype)

    @classmethod
    def of(cls, name):
        arch = ARCHITECTURES[name]
        return cls(arch.build, arch.likelihood, arch.dtype)

    def jacobians(self, x):
        """Outputs (B, C) and Jacobians (B, C, P) by autograd, in float64."""
        return dense.jacobians(self.exact, cast(x, torch.float64))

    @property
    def tolerance(self):
        """Of results in the model's dtype, relative to the largest of them."""
        return 1e-6 if self.model is self.exact else 1e-4

    @property
    def params(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def loader(self, batch_size=2):
        if not isinstance(self.x, dict):
            return DataLoader(TensorDataset(self.x, self.y), batch_size)
        items = [take(self.x, i) | {"labels": self.y[i]} for i in range(self.N)]
        return DataLoader(items, batch_size)

    def fit(self, **kwargs):
        options = {"subsample_size": 1000, "n_eigenvalues": K, "complement": "drop"}
        options |= kwargs
        la = Laplace(self.model, self.likelihood, "all", "nystrom", **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)
            la.fit(self.loader())
        return la


def finite_difference(model, x, V, z, eps=1e-6):
    """(f(θ + εVz) − f(θ − εVz)) / 2ε (B, C)."""
    params = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in params]
    steps = (V @ z).split([p.numel() for p in params])
    outputs = []
    with torch.no_grad():
        for sign in (1, -1):
            for p, b, step in zip(params, before, steps, strict=True):
                p.copy_(b + sign * eps * step.reshape(p.shape))
            outputs.append(model(x))
        for p, b in zip(params, before, strict=True):
            p.copy_(b)
    return (outputs[0] - outputs[1]) / (2 * eps)


def close(actual, expected, tolerance):
    """Equal up to a tolerance relative to the largest value."""
    atol = tolerance * float(expected.abs().max())
    assert_close(actual.double(), expected.double(), rtol=10 * tolerance, atol=atol)


def check_features(problem, la):
    """Outputs are the model's, features its derivatives along the directions."""
    f_mu, phi = la.features(problem.x_test)
    with torch.no_grad():
        close(f_mu, problem.model(problem.x_test), problem.tolerance)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(la.rank, generator=generator, dtype=torch.float64)
    x, V = cast(problem.x_test, torch.float64), la.basis.vectors.double()
    along = finite_difference(problem.exact, x, V, z)
    assert along.abs().max() > 1e-6, "the model does not depend on the directions"
    close(phi.double() @ z, along, problem.tolerance)


# --- the architectures -------------------------------------------------------------


def images(size, channels=3, n=5):
    return torch.randn(n, channels, size, size)


@architecture(likelihood="regression")
def multilayer_perceptron():
    return mlp(3, 6, 6, C), torch.randn(5, 3)


@architecture()
def cnn_batchnorm():
    return CNN(C), images(6, 1)


@architecture()
def cnn_groupnorm():
    body = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, C)), images(6, 1)


@architecture()
def cnn_layernorm():
    body = [nn.Conv2d(1, 3, 3), nn.LayerNorm([3, 4, 4]), nn.GELU(), nn.AvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(12, C)), images(6, 1)


@architecture()
def torchvision_resnet18():
    """With its last stage, three quarters of the parameters, frozen."""
    model = torchvision_models().resnet18(num_classes=C)
    model.layer4.requires_grad_(False)
    return model, images(16)


@architecture()
def torchvision_efficientnet():
    models = torchvision_models()
    config = models.efficientnet.MBConvConfig
    stages = [config(1, 3, 1, 8, 8, 1, 1, 1), config(2, 3, 2, 8, 8, 2, 1, 1)]
    model = models.EfficientNet(stages, dropout=0.2, num_classes=C)
    model.classifier[1].weight.data.normal_()
    return model, images(16)


@architecture()
def torchvision_swin():
    models = torchvision_models()
    model = models.SwinTransformer(
        [2, 2], 8, [2, 2], [1, 2], [2, 2], stochastic_depth_prob=0.1, num_classes=C
    )
    return model, images(8)


@architecture()
def torchvision_convnext():
    models = torchvision_models()
    config = models.convnext.CNBlockConfig
    stages = [config(8, 16, 1), config(16, None, 1)]
    return models.ConvNeXt(stages, layer_scale=0.5, num_classes=C), images(16)


@architecture()
def torchvision_vit():
    models = torchvision_models()
    model = models.VisionTransformer(8, 4, 2, 2, 8, 16, num_classes=C)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts with zeros
    return model, images(8)


@architecture()
def timm_vit():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.models.VisionTransformer(8, 4, 3, C, embed_dim=8, depth=2, num_heads=2)
    nn.init.normal_(model.head.weight)
    return model, images(8)


@architecture()
def timm_mlp_mixer():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.models.MlpMixer(C, 8, patch_size=4, num_blocks=2, embed_dim=8)
    nn.init.normal_(model.head.weight)
    return model, images(8)


@architecture()
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
    return Sequence(nn.TransformerEncoder(layer, 2), 4), torch.randn(5, 3, 4)


class SelfAttention(nn.Module):
    """Masked attention of a sequence with itself, the last position read out."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x)
        h, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.head(h[:, -1])


@architecture()
def multihead_attention():
    return SelfAttention(), torch.randn(5, 3, 4)


@architecture(dtype=torch.float32)
def transformer_encoder_float32():
    return transformer_encoder()


@architecture(rows="loop")
def lstm():
    return Sequence(nn.LSTM(3, 4, 2, batch_first=True), 4), torch.randn(5, 3, 3)


@architecture(forward=None, rows="loop", dtype=torch.float32)
def lstm_float32():
    """The fused kernel of the CPU: no forward derivative, rows but not Jacobians
    by vmap."""
    return lstm()


@architecture(rows="loop", likelihood="regression")
def gru():
    return Sequence(nn.GRU(3, 4, batch_first=True), 4), torch.randn(5, 3, 3)


def tokens(length=4, words=7):
    return torch.randint(words, (5, length))


@architecture(forward=None, double_vjp=False)
def embedding_bag():
    return nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, C)), tokens()


@architecture()
def embedding():
    """A table of vectors with a padding index, gradients not sparse."""
    table = nn.Embedding(7, 3, padding_idx=0)
    return nn.Sequential(table, nn.Flatten(), nn.Tanh(), nn.Linear(12, C)), tokens()


@architecture()
def tied_layers():
    model = TiedModel(4)
    model.head = nn.Linear(4, C)
    return model, torch.randn(5, 4)


class TiedEmbedding(nn.Module):
    """One matrix embeds the words and reads them out, as in language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(C, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, C, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.embed(x).mean(1))))


@architecture()
def tied_embedding():
    return TiedEmbedding(), torch.tensor([[0, 0], [0, 1], [1, 1], [1, 0], [0, 0]])


@architecture(forward=None)
def weight_norm():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(4, C)), torch.randn(5, 3)


@architecture()
def spectral_norm():
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(4, C)), torch.randn(5, 3)


@architecture()
def spectral_norm_by_hook():
    """The older implementation: a hook that writes the weight at every call."""
    normed = nn.utils.spectral_norm(nn.Linear(3, 4))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(4, C)), torch.randn(5, 3)


@architecture()
def dropout():
    body = [nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.AlphaDropout(0.3)]
    return nn.Sequential(*body, nn.Linear(8, C)), torch.randn(5, 3)


class ControlFlow(nn.Module):
    """Every example takes its own path and its own number of steps."""

    def __init__(self):
        super().__init__()
        self.step, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, C)

    def path(self, h):
        steps = 0
        while steps < 2 + int(h.detach().abs().sum()) % 3:
            h = torch.tanh(self.step(h) if h[0] > 0 else self.other(h))
            steps += 1
        return h

    def forward(self, x):
        return self.head(torch.stack([self.path(h) for h in x]))


@architecture(rows="loop")
def control_flow():
    return ControlFlow(), torch.randn(5, 3)


class IntegerBuffers(nn.Module):
    """Buffers that index and mask, as many models keep."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, C)
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x):
        h = torch.tanh(x * self.embed(self.positions))
        return self.head((h * self.mask[:, None]).sum(1))


@architecture()
def integer_buffers():
    return IntegerBuffers(), torch.randn(5, 4, 3)


class CountingBuffer(nn.Module):
    """A buffer that the forward pass writes, in place."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 4, C)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.net(x)


@architecture()
def counting_buffer():
    return CountingBuffer(), torch.randn(5, 3)


@architecture()
def data_parallel():
    return nn.DataParallel(mlp(3, 6, C)), torch.randn(5, 3)


@architecture()
def compiled():
    return torch.compile(mlp(3, 6, C), backend="eager"), torch.randn(5, 3)


# --- Hugging Face ------------------------------------------------------------------


class Logits(nn.Module):
    """A Hugging Face classifier of mapping batches that returns its logits."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        mask = batch["attention_mask"]
        return self.net(input_ids=batch["input_ids"], attention_mask=mask).logits


PAD = 0


def sentences(lengths=(5, 3, 4, 2, 5), words=11):
    """Token ids of sentences that are padded on the right, and their mask."""
    lengths = torch.tensor(lengths)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1, words, mask.shape) * mask + PAD * (1 - mask)
    return {"input_ids": ids, "attention_mask": mask}


def torchvision_models():
    return pytest.importorskip(
        "torchvision", reason="torchvision is not installed"
    ).models


def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def build_bert():
    config = transformers().BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
        num_labels=C,
        pad_token_id=PAD,
        initializer_range=0.3,
    )
    return transformers().BertForSequenceClassification(config)


def build_gpt2():
    config = transformers().GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        num_labels=C,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.3,
    )
    return transformers().GPT2ForSequenceClassification(config)


def with_lora(net, *targets):
    """Only low-rank adapters trainable; not at zero, where half their gradients are."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        target_modules=list(targets),
        init_lora_weights=False,
        fan_in_fan_out="c_attn" in targets,
    )
    return peft.get_peft_model(net, config)


@architecture(rows="loop")
def bert():
    return Logits(build_bert()), sentences()


@architecture(rows="loop")
def gpt2():
    return Logits(build_gpt2()), sentences()


@architecture(rows="loop")
def bert_lora():
    return Logits(with_lora(build_bert(), "query", "value")), sentences()


@architecture(rows="loop")
def gpt2_lora():
    return Logits(with_lora(build_gpt2(), "c_attn")), sentences()


# --- every architecture ------------------------------------------------------------


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def problem(name):
    return Problem.of(name)


@pytest.fixture(scope="module")
def la(problem):
    return problem.fit()


def test_features_are_directional_derivatives(problem, la):
    check_features(problem, la)


def test_basis_is_that_of_autograd(problem, la):
    """Orthonormal directions, along which ‖JV‖² are the top eigenvalues of JJᵀ."""
    rows = problem.jacobians(problem.x)[1].flatten(0, 1)
    eigenvalues = torch.linalg.eigvalsh(rows @ rows.T).flip(0)[: la.rank]
    V = la.basis.vectors.double()
    assert V.shape == (sum(p.numel() for p in problem.params), la.rank)
    close(V.T @ V, torch.eye(la.rank), problem.tolerance)
    close(la.basis.eigenvalues, eigenvalues, problem.tolerance)
    close((rows @ V).square().sum(0), eigenvalues, problem.tolerance)


def test_predictions_are_those_of_the_dense_posterior(problem, la):
    """Curvature and predictive from plain autograd Jacobians."""
    V, likelihood = la.basis.vectors.double(), problem.likelihood
    f, Js = problem.jacobians(problem.x)
    H = dense.curvature(Js, dense.loss_hessian(f, likelihood), V)
    close(la.H, H, problem.tolerance)
    f_mu, Js = problem.jacobians(problem.x_test)
    phi = Js @ V
    covariance = torch.linalg.inv(H + torch.eye(la.rank).to(H))
    f_var = phi @ covariance @ phi.mT
    if likelihood == "regression":
        mean, variance = la(problem.x_test)
        close(mean, f_mu, problem.tolerance)
        close(variance, f_var, problem.tolerance)
        return
    probs = la(problem.x_test, link_approx="probit")
    close(probs, dense.probit(f_mu, f_var), problem.tolerance)
    sampled = la(problem.x_test, pred_type="nn", link_approx="mc", n_samples=2)
    close(sampled.sum(-1), torch.ones(len(f_mu)), problem.tolerance)


RUNGS = {
    "forward": {"feature_mode": "forward"},
    "double_vjp": {"feature_mode": "double_vjp"},
    "rows_vmap": {"feature_mode": "reverse", "row_mode": "vmap"},
    "rows_loop": {"feature_mode": "reverse", "row_mode": "loop"},
}


def supported(arch):
    """The rungs that an architecture was measured to support."""
    works = {
        "forward": arch.forward is not None,
        "double_vjp": arch.double_vjp,
        "rows_vmap": arch.rows == "vmap",
        "rows_loop": True,
    }
    return {rung for rung in RUNGS if works[rung]}


def measured_here():
    return tuple(map(int, torch.__version__.split(".")[:2])) == MEASURED_WITH


@pytest.mark.parametrize("rung", RUNGS)
def test_rung(name, problem, rung):
    """Every rung that works gives the derivatives; another says what failed."""
    arch, modes = ARCHITECTURES[name], RUNGS[rung]
    if measured_here() and rung not in supported(arch):
        message = r"could not be differentiated.* Options: "
        with pytest.raises(RuntimeError, match=message):
            problem.fit(**modes, n_eigenvalues=2)
        return
    try:
        la = problem.fit(**modes, n_eigenvalues=2)
    except RuntimeError as error:
        if measured_here():
            raise
        pytest.skip(f"not with torch {torch.__version__}: {error}")
    check_features(problem, la)
    chosen = la.modes
    assert chosen.features == modes["feature_mode"]
    assert chosen.rows == modes.get("row_mode", chosen.rows)
    if measured_here() and rung == "forward":
        assert arch.forward == "vmap" or not chosen.together


def test_the_ladder_finds_a_rung_that_works(name, la):
    """What `auto` chose is among what works."""
    if not measured_here():
        pytest.skip(f"the rungs were measured with torch {MEASURED_WITH}")
    arch, chosen = ARCHITECTURES[name], la.modes
    assert chosen.features in supported(arch) | {"reverse"}
    if chosen.features == "forward":
        assert arch.forward == "vmap" or not chosen.together
    assert arch.rows == "vmap" or chosen.jacobians in (None, "loop")


# --- what is special about some of them --------------------------------------------


def test_buffers_are_left_as_they_were():
    """A counter in the forward pass does not count our passes."""
    problem = Problem.of("counting_buffer")
    la = problem.fit()
    la(problem.x_test)
    assert problem.model.calls == 0


@pytest.mark.parametrize("name", ["data_parallel", "compiled"])
def test_wrappers_give_what_the_wrapped_module_gives(name):
    problem = Problem.of(name)
    wrapped = problem.fit(feature_mode="forward")
    inner = copy.copy(problem)
    inner.model = getattr(problem.model, "_orig_mod", None) or problem.model.module
    bare = inner.fit(feature_mode="forward")
    assert_close(wrapped.H, bare.H)
    assert_close(wrapped(problem.x_test), bare(problem.x_test))
    bare.load_state_dict(wrapped.state_dict())


@pytest.mark.parametrize("name", ["bert", "gpt2", "bert_lora", "gpt2_lora"])
def test_padding_changes_nothing(name):
    """Features of a padded batch are those of every sentence alone, unpadded."""
    problem = Problem.of(name)
    la = problem.fit()
    f, phi = la.features(problem.x_test)
    for i, length in enumerate(problem.x_test["attention_mask"].sum(1).tolist()):
        alone = {k: v[i : i + 1, :length] for k, v in problem.x_test.items()}
        f_alone, phi_alone = la.features(alone)
        assert_close(f_alone[0], f[i])
        assert_close(phi_alone[0], phi[i], rtol=1e-6, atol=1e-8)


def test_batches_padded_to_their_own_length():
    """Batches of different widths, as dynamic padding makes them."""
    problem = Problem.of("bert")
    widest = problem.fit()

    def collate(items):
        batch = torch.utils.data.default_collate(items)
        length = int(batch["attention_mask"].sum(1).max())
        cut = {k: batch[k][:, :length] for k in ("input_ids", "attention_mask")}
        return cut | {"labels": batch["labels"]}

    la = Laplace(
        problem.model,
        "classification",
        "all",
        "nystrom",
        subsample_size=1000,
        n_eigenvalues=K,
    )
    la.fit(DataLoader(problem.loader().dataset, 1, collate_fn=collate))
    assert_close(la.basis.eigenvalues, widest.basis.eigenvalues, rtol=1e-6)
    assert_close(la(problem.x_test), widest(problem.x_test), rtol=1e-6)


def test_batch_encoding_and_other_keys():
    """The tokenizer's own mapping type, and targets under another key."""
    problem = Problem.of("bert")
    encoding = transformers().BatchEncoding

    def collate(items):
        batch = torch.utils.data.default_collate(items)
        return encoding({**take(batch, slice(None)), "answer": batch["labels"]})

    la = Laplace(
        problem.model,
        "classification",
        "all",
        "nystrom",
        subsample_size=1000,
        n_eigenvalues=K,
        dict_key_x="input_ids",
        dict_key_y="answer",
    )
    la.fit(DataLoader(problem.loader().dataset, 2, collate_fn=collate))
    assert_close(la(encoding(problem.x_test)), problem.fit()(problem.x_test))


@pytest.mark.parametrize(
    ("build", "targets"), [(build_bert, ("query", "value")), (build_gpt2, ("c_attn",))]
)
def test_lora_costs_what_its_adapters_cost(build, targets):
    """The basis holds the adapters alone; flops and memory fall."""
    plain = Problem(lambda: (Logits(build()), sentences()))
    lora = Problem(lambda: (Logits(with_lora(build(), *targets)), sentences()))
    trainable = [n for n, p in lora.model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in n for n in trainable)

    def cost(problem):
        la = problem.fit(feature_mode="reverse", row_mode="loop")
        with FlopCounterMode(display=False) as counter:
            la.features(problem.x_test)
        return la, counter.get_total_flops(), la.estimate_memory(problem.loader())

    la, flops, memory = cost(lora)
    full, full_flops, full_memory = cost(plain)
    assert la.n_params == sum(p.numel() for p in lora.params) < full.n_params / 5
    assert la.basis.vectors.shape == (la.n_params, K)
    assert list(la.linearizer.fn.names) == trainable
    assert memory.basis < full_memory.basis / 5
    assert memory.total < full_memory.total
    assert flops < 0.9 * full_flops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_base_with_float32_adapters(dtype):
    """Float32 directions and results; derivatives those of the float64 model."""

    def build():
        net = with_lora(build_bert().to(dtype), "query", "value")
        return Logits(net), sentences()

    half = Problem(build, dtype=None)
    assert {p.dtype for p in half.params} == {torch.float32}
    assert next(half.model.parameters()).dtype == dtype

    la = half.fit()
    assert la.basis.vectors.dtype == torch.float32
    f_mu, phi = la.features(half.x_test)
    assert f_mu.dtype == phi.dtype == torch.float32
    probs = la(half.x_test, link_approx="mc", n_samples=64)
    assert probs.dtype == torch.float32
    assert torch.isfinite(probs).all()

    # The same numbers as plain autograd, up to the rounding of the half type.
    rounding = 4 * torch.finfo(dtype).eps
    _, Js = dense.jacobians(half.model, half.x_test, half.params)
    expected = Js @ la.basis.vectors
    assert_close(phi, expected, 0.02, rounding * float(expected.abs().max()))
    f, Js = half.jacobians(half.x_test)
    assert_close(f_mu.double(), f, 0.02, rounding * float(f.abs().max()))
    expected = Js @ la.basis.vectors.double()
    bound = 4 * rounding * float(expected.abs().max())
    assert_close(phi.double(), expected, 0.05, bound)


class Int8Linear(nn.Module):
    """Weights kept as int8 with a scale a row, and a float adapter beside them."""

    def __init__(self, n_in, n_out, rank=2):
        super().__init__()
        weight = torch.randn(n_out, n_in)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("quantized", (weight / scale).round().to(torch.int8))
        self.down = nn.Parameter(torch.randn(rank, n_in))
        self.up = nn.Parameter(torch.randn(n_out, rank))

    def forward(self, x):
        base = nn.functional.linear(x, self.quantized.to(x) * self.scale.to(x))
        return base + x @ self.down.T @ self.up.T


def test_quantised_base_with_adapters():
    """Integer weights are buffers: only the adapters are uncertain, and exact."""

    def build():
        body = nn.Sequential(Int8Linear(4, 6), nn.GELU(), Int8Linear(6, C))
        return body, torch.randn(7, 4)

    problem = Problem(build)
    la = problem.fit()
    assert all("down" in n or "up" in n for n in la.linearizer.fn.names)
    before = [b.clone() for b in problem.model.buffers()]
    f_mu, phi = la.features(problem.x_test)
    f, Js = dense.jacobians(problem.model, problem.x_test, problem.params)
    assert_close(f_mu, f)
    assert_close(phi, Js @ la.basis.vectors)
    assert all(
        torch.equal(a, b) for a, b in zip(before, problem.model.buffers(), strict=True)
    )
    assert problem.model[0].quantized.dtype == torch.int8


def test_unsupported_model_names_the_operator_and_the_options():
    """A model that no way can differentiate."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, C)

        def forward(self, x):
            with torch.no_grad():
                return self.layer(x)

    problem = Problem(lambda: (Detached(), torch.randn(5, 3)))
    with pytest.raises(RuntimeError, match=r"could not be differentiated.*last_layer"):
        problem.fit(row_mode="loop")
