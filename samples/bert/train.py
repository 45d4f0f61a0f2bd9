"""Fine-tune BERT for question answering in a plain loop."""

import argparse
from pathlib import Path

import torch
from squad import add_arguments, make_config, make_data, parse
from torch.utils.data import DataLoader
from transformers import BertForQuestionAnswering, get_linear_schedule_with_warmup


def make_optimizer(model, lr):
    plain = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(plain)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(plain)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--save", type=Path, help="write the trained weights here")
    args = parse(parser)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = make_config(args.size)
    model = BertForQuestionAnswering(config).to(device)
    loader = DataLoader(make_data(args, config), batch_size=args.batch_size, shuffle=True)
    optimizer = make_optimizer(model, args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, args.steps // 10, args.steps)

    model.train()
    for step, batch in enumerate(loader):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == len(loader) - 1:
            print(f"step {step:3d} / {len(loader)}  loss {loss.item():.6f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
