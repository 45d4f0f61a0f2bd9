"""The Trainer is stopped, built again, and resumes from its last checkpoint; early stopping and best model at the end."""

import torch
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Numbers(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 50, (count, 10), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.ids[i, 0] > 25)}


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "eval_loss"):
            if name in logs:
                print(f"{name} at {state.global_step}: {logs[name]:.6f}")


def make(epochs):
    set_seed(1)
    config = DistilBertConfig(vocab_size=50, dim=32, n_layers=3, n_heads=4, hidden_dim=64, max_position_embeddings=16)
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        num_train_epochs=epochs,
        learning_rate=2e-3,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=Numbers(48, 0),
        eval_dataset=Numbers(16, 1),
        callbacks=[Report(), EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


if __name__ == "__main__":
    make(2).train()
    print("--- again, from the checkpoint")
    trainer = make(3)
    result = trainer.train(resume_from_checkpoint=True)
    print(f"global step {result.global_step}, training loss {result.training_loss:.6f}")
    torch.save(trainer.model.state_dict(), "checkpoint.pt")
