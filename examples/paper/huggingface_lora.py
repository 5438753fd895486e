"""ELLA on the LoRA adapters of a Hugging Face transformer, on words rated by people.

The task: is an English word positive or negative? The labels are those of the VADER
lexicon (Hutto and Gilbert, ICWSM 2014; ten raters per word), which the PyPI package
vaderSentiment ships. A GPT-2 of characters is built from a config, learns to spell the
words of Python's own documentation, and is then frozen; adapters (PEFT) and a linear
head learn the task. Nothing is downloaded.

ELLA sees mapping batches and only what is trainable. It is compared with the network
itself (MAP) and with the exact Laplace approximation of the head.

    python examples/paper/huggingface_lora.py            # minutes
    python examples/paper/huggingface_lora.py --smoke    # seconds
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from common import runs
from laplace import Laplace
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from laplace_ella.errors import RankWarning
from laplace_ella.metrics import classification_metrics

PAD, START = 0, 1
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 15


@dataclass(frozen=True)
class Size:
    """How much is trained and sampled."""

    width: int = 64
    n_layers: int = 2
    n_words: int = 8000
    spelling_epochs: int = 10
    adapter_epochs: int = 60
    n_samples: int = 1000
    rank: int = 32


SMOKE = Size(16, 1, 240, 1, 1, 40, 4)


# Data


def rated_words() -> list[dict[str, torch.Tensor | int]]:
    """Words of the VADER lexicon with the sign of their mean rating."""
    spec = find_spec("vaderSentiment")
    if spec is None:
        raise SystemExit("The labels are in a package: pip install vaderSentiment")
    path = Path(spec.submodule_search_locations[0]) / "vader_lexicon.txt"
    items = []
    for line in path.read_text(encoding="utf-8").splitlines():
        word, rating, *_ = line.split("\t")
        if re.fullmatch(f"[a-z]{{3,{LONGEST}}}", word) and float(rating) != 0:
            items.append({"input_ids": encode(word), "labels": int(float(rating) > 0)})
    return items


def documentation_words() -> list[dict[str, torch.Tensor]]:
    """The different words of Python's documentation, without labels."""
    text = " ".join(topics.values()).lower()
    words = sorted(set(re.findall(f"[a-z]{{3,{LONGEST}}}", text)))
    return [{"input_ids": encode(word)} for word in words]


def encode(word: str) -> torch.Tensor:
    """START, then one token per letter."""
    return torch.tensor([START] + [ALPHABET.index(c) + 2 for c in word])


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A batch padded to its longest word, with the mask that says so."""
    ids = nn.utils.rnn.pad_sequence(
        [item["input_ids"] for item in items], batch_first=True, padding_value=PAD
    )
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if "labels" in items[0]:
        batch["labels"] = torch.tensor([item["labels"] for item in items])
    return batch


def loader(items: list[dict], batch_size: int = 64, shuffle: bool = False):
    return DataLoader(items, batch_size, shuffle=shuffle, collate_fn=collate)


def split(items: list[dict], seed: int) -> tuple[list[dict], list[dict], list[dict]]:
    """Half for training, an eighth for validation, the rest for testing."""
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    shuffled = [items[i] for i in order]
    n_train, n_val = len(items) // 2, len(items) // 8
    return (
        shuffled[:n_train],
        shuffled[n_train : n_train + n_val],
        shuffled[n_train + n_val :],
    )


# Model


class Classifier(nn.Module):
    """Mapping batches to logits (B, C): the form that Laplace expects."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits


def train(
    model: nn.Module,
    batches: DataLoader,
    loss: Callable[[dict], torch.Tensor],
    n_epochs: int,
    lr: float,
) -> None:
    """Adam on what is trainable, with a falling learning rate."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=1e-3)
    n_steps = n_epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, n_steps)
    model.train()
    for _ in range(n_epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def learn_to_spell(size: Size, words: list[dict], seed: int) -> GPT2LMHeadModel:
    """A language model of letters: the base that stays frozen afterwards."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(ALPHABET) + 2,
        n_positions=LONGEST + 1,
        n_embd=size.width,
        n_layer=size.n_layers,
        n_head=4,
        num_labels=2,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=PAD,
    )
    model = GPT2LMHeadModel(config)

    def loss(batch: dict) -> torch.Tensor:
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(**batch, labels=targets).loss

    train(model, loader(words, shuffle=True), loss, size.spelling_epochs, 3e-3)
    return model


def learn_ratings(
    base: GPT2LMHeadModel, words: list[dict], size: Size, seed: int
) -> Classifier:
    """Adapters and head on the frozen base."""
    torch.manual_seed(seed)
    net = GPT2ForSequenceClassification(base.config)
    net.transformer.load_state_dict(base.transformer.state_dict())
    config = LoraConfig(
        task_type="SEQ_CLS",  # keeps the new head `score` trainable
        r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules=["c_attn", "c_fc", "c_proj"],
        fan_in_fan_out=True,
    )
    model = Classifier(get_peft_model(net, config))

    def loss(batch: dict) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch), batch["labels"])

    train(model, loader(words, shuffle=True), loss, size.adapter_epochs, 3e-3)
    return model


# Uncertainty


def head_name(model: nn.Module) -> str:
    """The trainable copy of the head that PEFT keeps."""
    names = [name for name, _ in model.named_modules()]
    return next(n for n in names if n.endswith("score.modules_to_save.default"))


def fit_laplace(
    model: nn.Module, size: Size, words: list[dict], validation: list[dict], subset: str
):
    """Directions from the training words, prior and temperature chosen on the
    validation words."""
    options = {"subsample_size": size.n_samples, "n_eigenvalues": size.rank}
    if subset == "last_layer":
        name = head_name(model)
        options["last_layer_name"] = name
        # as many directions as parameters: nothing is approximated
        options["n_eigenvalues"] = sum(
            p.numel() for p in model.get_submodule(name).parameters()
        )
    la = Laplace(
        model,
        "classification",
        subset,
        "nystrom",
        dict_key_x="input_ids",
        dict_key_y="labels",
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        la.fit(loader(words, batch_size=128))
    la.optimize_calibration(
        loader(validation, batch_size=128), link_approx="mc", n_samples=256
    )
    return la


def predict(model: Callable, words: list[dict]) -> torch.Tensor:
    """Probabilities (N, C)."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in loader(words, batch_size=128)])


def compare(size: Size, seed: int) -> tuple[dict[str, dict[str, float]], str]:
    """Return scores on the test words of one split, and what was fitted."""
    words = rated_words()
    spelling = documentation_words()
    keep = torch.randperm(len(words), generator=torch.Generator().manual_seed(1))
    words = [words[i] for i in keep[: size.n_words]]
    spelling = spelling[:: max(1, len(spelling) // size.n_words)]
    training, validation, testing = split(words, seed)
    # the letters of the training words may be seen, their ratings not yet
    letters = [{"input_ids": item["input_ids"]} for item in training]
    base = learn_to_spell(size, spelling + letters, seed)
    model = learn_ratings(base, training, size, seed)
    targets = torch.tensor([item["labels"] for item in testing])

    methods = {"MAP": lambda batch: model(batch).softmax(-1)}
    sizes = []
    for label, subset in (
        ("last-layer Laplace", "last_layer"),
        ("ELLA on the adapters", "all"),
    ):
        start = time.process_time()
        la = fit_laplace(model, size, training, validation, subset)
        sizes.append(
            f"{label}: P = {la.n_params:,}, K = {la.rank}, prior precision "
            f"{la.prior_precision.item():.3g}, as many data as "
            f"{la.effective_n_data:.3g}, fitted and tuned in "
            f"{time.process_time() - start:.0f} s of CPU time, features by "
            f"{la.modes.features.value}"
        )
        methods[label] = lambda b, la=la: la(b, link_approx="mc", n_samples=512)
    n_all = sum(p.numel() for p in model.parameters())
    about = f"Split {seed}: {len(training):,} training words, {n_all:,} weights; "
    results = {
        name: classification_metrics(predict(method, testing), targets)
        for name, method in methods.items()
    }
    print(f"split {seed}: {results}", flush=True)
    return results, about + "; ".join(sizes) + "."


def table(results: list[dict]) -> str:
    """Return the mean ± standard error over the splits."""
    rows = []
    for method in results[0]:
        row = {"method": method}
        for column in ("accuracy", "nll", "ece", "brier"):
            values = torch.tensor([result[method][column] for result in results])
            row[column] = f"{values.mean():.4f}"
            if len(values) > 1:
                row[column] += f" ± {values.std() / len(values) ** 0.5:.4f}"
        rows.append(row)
    return runs.markdown(rows)


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("huggingface_lora", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = runs.start(parser, argv)
    size, seeds = (SMOKE, [0]) if args.smoke else (Size(), args.seeds)
    found = [compare(size, seed) for seed in seeds]
    versions = ", ".join(f"{p} {version(p)}" for p in ("transformers", "peft"))
    text = (
        f"Test words of {len(found)} split(s), mean ± standard error; "
        f"{runs.environment(args.threads)}, {versions}.\n\n"
        + table([result for result, _ in found])
        + "".join(f"\n{about}\n" for _, about in found)
    )
    (args.out / "words.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
