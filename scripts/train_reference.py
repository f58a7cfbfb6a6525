"""Train the reference model: a small Llama whose position bias learns where to be silent.

The loss has two parts. The language-model loss reaches every weight, and the thresholds through the gate.
A hinge on the gate asks each threshold to lie `margin` nats above the highest position entropy of the
training logs, `relu(highest - threshold + margin)`. It pushes a threshold up while any log context would open
the gate, and has no gradient above; from there only the language-model loss moves it. Thresholds start at 0
(gate always open), so whatever value they end with was learned.

Most steps see `short` tokens of a context, gated by the entropy of all of it; the last ones see it whole.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from collapse.canonical import digest, dumps
from collapse.models import AdaptiveLlamaConfig, AdaptiveLlamaForCausalLM
from collapse.models.adaptive_llama import PositionContext
from collapse.models.position_bias import position_entropy
from scripts.reference_corpus import DOMAINS, documents, split, stream, train_tokenizer, windows
from scripts.reference_report import measure

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "collapse" / "models" / "reference"
REPORT = ROOT / "reports" / "reference.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result besides the samples and the library versions."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 3
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    context: int = 1024
    short: int = 256
    short_steps: int = 260
    short_batch: int = 12
    long_steps: int = 60
    long_batch: int = 3
    learning_rate: float = 4e-3
    bias_learning_rate: float = 2e-2
    threshold_learning_rate: float = 0.1
    margin: float = 0.08
    seed: int = 20


def build(recipe: Recipe) -> AdaptiveLlamaForCausalLM:
    """Return the untrained model."""
    torch.manual_seed(recipe.seed)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return AdaptiveLlamaForCausalLM(
        AdaptiveLlamaConfig(
            **{name: getattr(recipe, name) for name in names},
            num_key_value_heads=recipe.num_key_value_heads,
            max_position_embeddings=recipe.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


def optimisers(model: AdaptiveLlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for weights; plain gradient descent for thresholds, so that a zero gradient leaves them alone."""
    named = list(model.named_parameters())
    thresholds = [value for name, value in named if name.endswith("position_adaptive_bias.threshold")]
    biases = [value for name, value in named if name.endswith("position_adaptive_bias.weight")]
    special = {id(value) for value in (*thresholds, *biases)}
    rest = [value for _, value in named if id(value) not in special]
    groups = [
        {"params": [value for value in rest if value.dim() > 1], "weight_decay": 0.05},
        {"params": [value for value in rest if value.dim() == 1], "weight_decay": 0.0},
        {"params": biases, "lr": recipe.bias_learning_rate, "weight_decay": 0.0},
    ]
    weights = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.97))
    return [weights, torch.optim.SGD(thresholds, lr=recipe.threshold_learning_rate)]


def schedule(step: int, steps: int) -> float:
    """Warm up over 20 steps, then a cosine down to 5 %."""
    return min(1.0, (step + 1) / 20) * (0.525 + 0.475 * math.cos(math.pi * step / steps))


def highest_entropy(model: AdaptiveLlamaForCausalLM, logs: Tensor, context: int) -> float:
    """Return the highest position entropy in contexts of `logs` that start at every 32nd token, in nats."""
    rows = logs.unfold(0, context, 32)
    settings = model.config.entropy_settings
    return max(float(position_entropy(part + 1, settings).max()) for part in rows.split(64))


def training_ceiling(folder: Path, recipe: Recipe) -> float:
    """Return what the hinge held the thresholds above, for the model and tokenizer in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logs = stream(tokenizer, [split(text)[0] for text in documents("log")])
    return highest_entropy(AutoModelForCausalLM.from_pretrained(folder), logs, recipe.context)


def language_loss(model: AdaptiveLlamaForCausalLM, rows: Tensor, start: Tensor, length: int) -> Tensor:
    """Return the mean loss, nats a token, of `length` tokens of each row from `start` on."""
    entropy = position_entropy(rows + 1, model.config.entropy_settings)
    place = start[:, None] + torch.arange(length)
    ids = rows.gather(1, place)
    context = PositionContext(entropy.gather(1, place), torch.arange(length), ids + 1)
    logits = model(input_ids=ids, position_context=context, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: AdaptiveLlamaForCausalLM, streams: dict[str, Tensor], recipe: Recipe) -> list[dict[str, float]]:
    """Train in place; return the log: step, language loss, hinge, thresholds."""
    ceiling = highest_entropy(model, streams["log"], recipe.context)
    thresholds = [layer.self_attn.position_adaptive_bias.threshold for layer in model.model.layers]
    optims, history = optimisers(model, recipe), []
    bases = [[group["lr"] for group in optim.param_groups] for optim in optims]
    steps = recipe.short_steps + recipe.long_steps
    generator = torch.Generator().manual_seed(recipe.seed)
    began = time.monotonic()
    for step in range(steps):
        long = step >= recipe.short_steps
        length, batch = (recipe.context, recipe.long_batch) if long else (recipe.short, recipe.short_batch)
        rows = torch.cat(
            [windows(streams[domain], recipe.context, batch // len(DOMAINS), recipe.seed + step) for domain in DOMAINS]
        )
        start = torch.randint(0, recipe.context - length + 1, (len(rows),), generator=generator)
        loss = language_loss(model, rows, start, length)
        hinge = torch.stack([torch.relu(ceiling + recipe.margin - value) for value in thresholds]).sum()
        (loss + hinge).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.numel() > 1], 1.0)
        for optim, base in zip(optims, bases, strict=True):
            for group, rate in zip(optim.param_groups, base, strict=True):
                group["lr"] = rate * schedule(step, steps)
            optim.step()
            optim.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            entry = {"step": float(step), "loss": loss.item(), "hinge": hinge.item()}
            entry |= {f"threshold_{layer}": value.item() for layer, value in enumerate(thresholds)}
            history.append({name: round(value, 4) for name, value in entry.items()})
            print(f"{time.monotonic() - began:6.0f} s", history[-1], flush=True)
    return history


def main() -> None:
    """Train unless the checkpoint was made by this recipe from these samples; measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="train again even if nothing changed")
    parser.add_argument("--measure", action="store_true", help="only measure the checkpoint that is there")
    parser.add_argument("--other-text", type=Path, default=ROOT.parent / "shared" / "data", help="text to check on")
    parser.add_argument("--output", type=Path, default=CHECKPOINT)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    torch.set_num_threads(2)
    recipe = Recipe()
    samples = {domain: documents(domain) for domain in DOMAINS}
    made_from = digest({"recipe": asdict(recipe), "samples": samples})
    report = json.loads(options.report.read_text()) if options.report.is_file() else {}
    if report.get("made_from") == made_from and options.output.is_dir() and not (options.force or options.measure):
        print("already trained by this recipe; --force trains again")
        return
    if not options.measure:
        tokenizer = train_tokenizer(recipe.vocab_size, recipe.context)
        parts = {name: [split(text)[0] for text in texts] for name, texts in samples.items()}
        model = build(recipe)
        history = train(model, {name: stream(tokenizer, texts) for name, texts in parts.items()}, recipe)
        shutil.rmtree(options.output, ignore_errors=True)
        model.half().save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        report = {"made_from": made_from, "recipe": asdict(recipe), "training": history}
    report["measured"] = measure(options.output, options.other_text)
    report["measured"]["training_logs_entropy_max"] = round(training_ceiling(options.output, recipe), 4)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(dumps(report), encoding="utf-8")
    print(f"report: {options.report.name}")


if __name__ == "__main__":
    main()
