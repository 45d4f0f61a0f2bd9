"""Fine-tune BERT for question answering with transformers.Trainer."""

import argparse

from squad import add_arguments, make_config, make_data, parse
from transformers import BertForQuestionAnswering, Trainer, TrainingArguments, set_seed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--output", default="bert-output", help="folder of checkpoints")
    args = parse(parser)

    set_seed(args.seed)
    config = make_config(args.size)
    settings = TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=args.batch_size,
        max_steps=args.steps,
        learning_rate=args.lr,
        warmup_steps=args.steps // 10,
        weight_decay=0.01,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=args.seed,
    )
    data = make_data(args, config)
    trainer = Trainer(model=BertForQuestionAnswering(config), args=settings, train_dataset=data)
    trainer.train()
    print(f"loss {trainer.evaluate(data)['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
