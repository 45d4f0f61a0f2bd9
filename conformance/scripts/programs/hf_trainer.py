"""Text classification with the Trainer: accumulation, clipping, label smoothing, evaluation, metrics, checkpoints."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Reviews(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 90, (count, 12), generator=generator)
        self.labels = (self.ids[:, 0] > 45).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": self.labels[i]}


class Printer(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        kept = {k: round(v, 5) for k, v in logs.items() if k in ("loss", "grad_norm", "eval_loss", "eval_accuracy")}
        if kept:
            print(f"step {state.global_step}: {kept}")


def compute_metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
    )
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        num_train_epochs=2,
        learning_rate=1e-3,
        label_smoothing_factor=0.1,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Reviews(64, 0),
        eval_dataset=Reviews(24, 1),
        compute_metrics=compute_metrics,
        callbacks=[Printer()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    metrics = trainer.evaluate()
    print(f"final accuracy {metrics['eval_accuracy']:.4f} loss {metrics['eval_loss']:.5f}")
    torch.save(trainer.model.state_dict(), "checkpoint.pt")


if __name__ == "__main__":
    main()
