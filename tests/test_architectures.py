"""Kinds of networks, also other libraries': features against autograd's rows."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace
from tests import dense
from tests.cases import mlp

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

IMAGES = (3, 16, 16)


class ControlFlow(nn.Module):
    """A branch on a counter among the buffers, a loop, an unused layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        layer = self.first if bool(self.calls >= 0) else self.second
        for _ in range(2):
            x = torch.tanh(layer(x))
        return self.head(x)


class Bag(nn.Module):
    """An `EmbeddingBag`, which has no second derivative."""

    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.bag(x)))


def residual(width=4):
    block = nn.Sequential(nn.Conv2d(3, width, 3, groups=1), nn.GroupNorm(2, width))
    pool = nn.Sequential(nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    depthwise = nn.Conv2d(width, width, 3, groups=width, padding=1)
    return nn.Sequential(block, nn.SiLU(), depthwise, pool, nn.Linear(width, 3))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(9, 8), body, nn.Flatten(), nn.Linear(40, 3))


def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=9, num_labels=3, **sizes, **layers)
    return transformers.BertForSequenceClassification(config)


def timm_model(name, **options):
    timm = pytest.importorskip("timm")
    return timm.create_model(name, num_classes=3, **options)


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    return peft.get_peft_model(mlp(4, 6, 3), config)


WORDS, NUMBERS = (5,), (4,)
KINDS = {
    "control flow": (ControlFlow, NUMBERS),
    "bag": (Bag, WORDS),
    "residual": (residual, IMAGES),
    "encoder": (encoder, WORDS),
    "compiled": (lambda: torch.compile(mlp(4, 6, 3)), NUMBERS),
    "data parallel": (lambda: nn.DataParallel(mlp(4, 6, 3)), NUMBERS),
    "bert": (bert, WORDS),
    "vit": (
        lambda: timm_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2, embed_dim=12
        ),
        IMAGES,
    ),
    "convnext": (
        lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)),
        (3, 32, 32),
    ),
    "adapters": (adapted, NUMBERS),
}


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", KINDS)
def test_kinds(name, complement):
    """A fit finds ways that work; features and variances are those of the Jacobians."""
    torch.manual_seed(0)
    make_model, shape = KINDS[name]
    model = make_model().eval()
    x = torch.randint(9, (8, *shape)) if shape == WORDS else torch.randn(8, *shape)
    y = torch.randint(3, (8,))
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    options = {"subsample_size": 12, "n_eigenvalues": 4, "prior_precision": 2.0}
    la = ELLALaplace(model, "classification", complement=complement, **options)
    la.fit(DataLoader(TensorDataset(x, y), 4))
    outputs, phi = la.features(x)
    found = la._glm_predictive_distribution(x)[1]
    for key, b in model.named_buffers():
        assert torch.equal(b, buffers[key])
    plain = getattr(model, "_orig_mod", getattr(model, "module", model))
    params = [p for p in model.parameters() if p.requires_grad]
    f, Js = dense.jacobians(lambda x: getattr(f := plain(x), "logits", f), x, params)
    torch.testing.assert_close(outputs, f, rtol=1e-4, atol=1e-5)
    expected = Js @ la.basis.vectors
    torch.testing.assert_close(phi, expected, rtol=1e-3, atol=1e-4)
    V, precision = la.basis.vectors.double(), la.H + 2 * torch.eye(4).double()
    covariance = V @ torch.linalg.inv(precision) @ V.T
    if complement == "prior":
        covariance += (torch.eye(len(V)) - V @ V.T) / 2
    variance = Js.double() @ covariance @ Js.double().mT
    scale = float(variance.abs().max())
    torch.testing.assert_close(found.double(), variance, rtol=1e-3, atol=1e-3 * scale)
