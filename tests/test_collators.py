"""Batches of other libraries: Hugging Face's collators, PyTorch Geometric's graphs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_ella import ELLALaplace, ELLALLLaplace

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")

flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def needs(package):
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"not installed: {package}"
    )


# --- sequences whose batches differ in length ----------------------------------------

LENGTHS = (3, 5, 4, 2, 7, 6, 2, 2, 9, 4)
"""In batches of three, the longest are 5, 7, 9 and 4."""


def texts(per_token, n_classes=2, n_words=11):
    """Examples of different lengths, labelled as wholes or token by token."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for n in LENGTHS:
        ids = torch.randint(1, n_words, (n,), generator=generator).tolist()
        labels = [i % n_classes for i in ids]
        examples.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * n,
                "labels": labels if per_token else labels[0],
            }
        )
    return examples


def padded(examples):
    """What Hugging Face's DataCollatorWithPadding does: each batch to its longest."""
    longest = max(len(e["input_ids"]) for e in examples)

    def rows(key):
        return torch.tensor([e[key] + [0] * (longest - len(e[key])) for e in examples])

    batch = {key: rows(key) for key in ("input_ids", "attention_mask")}
    return {**batch, "labels": torch.tensor([e["labels"] for e in examples])}


class Pooled(nn.Module):
    """Classifies sequences by the mean over their tokens, without the padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(11, 4),
            nn.Linear(4, 5),
            nn.Linear(5, 2),
        )

    def forward(self, batch):
        mask = batch["attention_mask"].unsqueeze(-1)
        h = torch.tanh(self.body(self.embed(batch["input_ids"]))) * mask
        return self.head(h.sum(1) / mask.sum(1))


@flavours
@pytest.mark.parametrize("feature_mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("row_mode", ["vmap", "loop"])
@pytest.mark.parametrize("stochastic", [False, 2])
def test_sequences_of_different_lengths(cls, feature_mode, row_mode, stochastic):
    """Outputs (B, C) do not depend on the padding, so neither does the posterior."""
    torch.manual_seed(0)
    model = Pooled().double()
    examples = texts(per_token=False)
    options = {"n_eigenvalues": 6, "feature_mode": feature_mode, "row_mode": row_mode}
    together, apart = (
        cls(model, "classification", stochastic=stochastic, **options) for _ in "12"
    )
    together.fit(DataLoader(examples, batch_size=len(examples), collate_fn=padded))
    loader = DataLoader(examples, batch_size=3, collate_fn=padded)
    apart.fit(loader, val_loader=loader)
    assert {batch["input_ids"].shape[1] for batch in loader} == {5, 7, 9, 4}
    if not stochastic:
        torch.testing.assert_close(
            apart.posterior_precision.logdet(), together.posterior_precision.logdet()
        )
    whole = padded(examples)
    probs = torch.cat([apart(batch) for batch in loader])
    torch.testing.assert_close(probs, apart(whole))
    if not stochastic:
        torch.testing.assert_close(probs, together(whole))
    cache = apart.cache_features(loader)
    torch.testing.assert_close(apart.predict_from_cache(cache), probs)
    apart.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=3)


def tokenizer():
    """Of words that are numbers, built here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, **{str(i): i for i in range(1, 11)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[PAD]"
    )


class Logits(nn.Module):
    """A Hugging Face model as a function of the batch alone."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(self, batch):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return self.hf(**inputs).logits


def small_bert(per_token):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=2,
    )
    kind = "TokenClassification" if per_token else "SequenceClassification"
    return Logits(getattr(transformers, f"BertFor{kind}")(config)).eval()


@needs("transformers")
@flavours
def test_hugging_face_pads_each_batch(cls):
    """`DataCollatorWithPadding` as it is, for a classifier of sequences."""
    from transformers import DataCollatorWithPadding

    loader = DataLoader(
        texts(per_token=False),
        batch_size=3,
        collate_fn=DataCollatorWithPadding(tokenizer()),
    )
    assert len({batch["input_ids"].shape[1] for batch in loader}) > 1
    la = cls(small_bert(per_token=False), "classification", n_eigenvalues=4)
    la.fit(loader)
    assert la.n_data == len(LENGTHS)
    for batch in loader:
        probs = la(batch)
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)))


@needs("transformers")
def test_hugging_face_pads_tokens_to_one_length():
    """What the error says is what works."""
    from transformers import DataCollatorForTokenClassification

    examples = texts(per_token=True)

    def fit(**padding):
        la = ELLALaplace(
            small_bert(per_token=True),
            "classification",
            output_layout="channels_last",
            n_eigenvalues=4,
        )
        collate = DataCollatorForTokenClassification(tokenizer(), **padding)
        la.fit(DataLoader(examples, batch_size=3, collate_fn=collate))
        return la

    with pytest.raises(
        ValueError, match=r"(?s)ForTokenClassification.*padding='max_length'"
    ):
        fit()
    la = fit(padding="max_length", max_length=max(LENGTHS))
    # Predictions may have any length.
    short = DataCollatorForTokenClassification(tokenizer())(examples[:2])
    assert la(short).shape == (2, 5, 2)


def test_tokens_of_different_lengths():
    """The same error without Hugging Face."""

    def collate(examples):
        batch = padded([{**e, "labels": 0} for e in examples])
        size = batch["input_ids"].shape[1]
        labels = [e["labels"] + [-100] * (size - len(e["labels"])) for e in examples]
        return {**batch, "labels": torch.tensor(labels)}

    class Tagger(Pooled):
        def forward(self, batch):
            return self.head(torch.tanh(self.body(self.embed(batch["input_ids"]))))

    la = ELLALaplace(Tagger(), "classification", output_layout="channels_last")
    loader = DataLoader(texts(per_token=True), batch_size=3, collate_fn=collate)
    with pytest.raises(ValueError, match=r"got 5 and 7\. Pad all.*class -100.*max_len"):
        la.fit(loader)


# --- graphs --------------------------------------------------------------------------


class PlainGraphs:
    """What of a batch of PyTorch Geometric tells it apart."""

    def __init__(self, size):
        self.num_graphs = size

    def to_data_list(self):
        return [self]

    def to(self, device):
        return self


class Dense(nn.Module):
    """A graph network on padded node features and adjacency matrices."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch):
        h = torch.tanh(batch["adjacency"] @ self.body(batch["nodes"]))
        return self.head(h.mean(1))


def dense_graphs(examples):
    return {
        "nodes": torch.stack([e["nodes"] for e in examples]),
        "adjacency": torch.stack([e["adjacency"] for e in examples]),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


@pytest.fixture
def graphs():
    """Six graphs of four nodes each."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "nodes": torch.randn(4, 3, generator=generator),
            "adjacency": torch.eye(4).roll(1, 0) + torch.eye(4),
            "labels": i % 2,
        }
        for i in range(6)
    ]


@flavours
def test_graphs_are_refused_with_a_remedy(cls, graphs):
    """And the remedy works."""
    remedy = r"cannot be split into examples.*padded.*adjacency.*\(inputs, targets\)"
    la = cls(Dense(), "classification")

    def collate(examples):
        return PlainGraphs(len(examples)), torch.zeros(len(examples))

    with pytest.raises(TypeError, match=remedy):
        la.fit(DataLoader(graphs, batch_size=3, collate_fn=collate))
    with pytest.raises(TypeError, match=remedy):
        la.fit(
            DataLoader(graphs, batch_size=3, collate_fn=lambda e: PlainGraphs(len(e)))
        )
    la.fit(DataLoader(graphs, batch_size=3, collate_fn=dense_graphs))
    with pytest.raises(TypeError, match=remedy):
        la(PlainGraphs(2))
    assert la(dense_graphs(graphs)).shape == (6, 2)


@needs("torch_geometric")
@flavours
@pytest.mark.parametrize("targets", ["inside", "beside"])
def test_pytorch_geometric(cls, targets, graphs):
    """Its loader yields one graph of many, with the targets in it or beside it."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = GCNConv(3, 4), nn.Linear(4, 2)

        def forward(self, graph):
            h = torch.tanh(self.body(graph.x, graph.edge_index))
            return self.head(global_mean_pool(h, graph.batch))

    items = [
        Data(
            x=graph["nodes"],
            edge_index=graph["adjacency"].nonzero().T,
            y=torch.tensor([graph["labels"]]),
        )
        for graph in graphs
    ]
    assert Network()(Batch.from_data_list(items)).shape == (6, 2)
    if targets == "beside":
        items = [(item, item.y[0]) for item in items]
    la = cls(Network(), "classification")
    with pytest.raises(TypeError, match=r"DataBatch.*cannot be split.*Wrap the model"):
        la.fit(GraphLoader(items, batch_size=3))
    # Padded as it says, the same graphs are fitted, and refused once more when given
    # as they were.
    la = cls(Dense(), "classification")
    la.fit(DataLoader(graphs, batch_size=3, collate_fn=dense_graphs))
    batch = next(iter(GraphLoader(items, batch_size=3)))
    with pytest.raises(TypeError, match="DataBatch"):
        la(batch[0] if targets == "beside" else batch)
