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

import argparse
import json
import platform
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

from laplace_ella import RankWarning
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
    la.optimize_temperature(
        loader(validation, batch_size=128),
        link_approx="mc",
        n_samples=256,
        tune_prior=True,
    )
    return la


def predict(model: Callable, words: list[dict]) -> torch.Tensor:
    """Probabilities (N, C)."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in loader(words, batch_size=128)])


def compare(size: Size, seed: int) -> dict[str, dict[str, float] | str]:
    """Metrics of each method on the test words of one split, and what was fitted."""
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
    about = "; ".join([f"{len(training):,} training words, {n_all:,} weights", *sizes])
    print(f"seed {seed}: {about}", flush=True)
    results = {"about": about}
    for name, method in methods.items():
        results[name] = classification_metrics(predict(method, testing), targets)
        print(f"  {name}: {results[name]}", flush=True)
    return results


def table(results: list[dict]) -> str:
    """Markdown: mean ± standard error over the splits."""
    columns = ("accuracy", "nll", "ece", "brier")
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for method in [key for key in results[0] if key != "about"]:
        cells = []
        for column in columns:
            values = torch.tensor([result[method][column] for result in results])
            cell = f"{values.mean():.4f}"
            if len(values) > 1:
                cell += f" ± {values.std() / len(values) ** 0.5:.4f}"
            cells.append(cell)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", help="of the splits")
    runs.add_output(parser)
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    args.out = runs.output_folder("huggingface_lora", args)
    for seed in args.seeds or ([0] if args.smoke else [0, 1, 2]):
        result = json.dumps(compare(size, seed), indent=1, ensure_ascii=False)
        (args.out / f"seed-{seed}.json").write_text(result, encoding="utf-8")
        print(write_page(args.out, args.smoke), flush=True)


def write_page(folder: Path, smoke: bool) -> str:
    """The page of all splits so far, so that they may run one by one; its table."""
    files = sorted(folder.glob("seed-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    text = table(results)
    packages = ("torch", "transformers", "peft", "vaderSentiment")
    versions = ", ".join(f"{p} {version(p)}" for p in packages)
    seeds = " ".join(file.stem.removeprefix("seed-") for file in files)
    command = f"python examples/paper/huggingface_lora.py --seeds {seeds}"
    command += " --smoke" * smoke
    error = " ± standard error" * (len(results) > 1)
    about = (
        f"Test words of {len(results)} split(s), mean{error}. Made by "
        f"`{command}` on {platform.machine()}, {torch.get_num_threads()} thread(s), "
        f"{versions}.\n\nFirst split: {results[0]['about']}."
    )
    (folder / "results.md").write_text(
        f"# ELLA on LoRA adapters\n\n{text}\n\n{about}\n", encoding="utf-8"
    )
    return text


if __name__ == "__main__":
    main()
