"""The vocabulary of PyTorch and of the libraries on it: transformers, Lightning, accelerate, timm.

A pattern with an empty kind excludes the names it matches.
"""

from __future__ import annotations

from gemini.instrument.inspect.vocabulary import Vocabulary

_OPS = (
    "abs", "add", "addmm", "baddbmm", "bmm", "cat", "chunk", "clamp", "concat", "conv1d", "conv2d", "conv3d",
    "cos", "cosine_similarity", "cumsum", "dropout", "einsum", "embedding", "erf", "exp", "flatten", "flip",
    "gather", "gelu", "group_norm", "index_select", "layer_norm", "log", "log_softmax", "logsumexp",
    "masked_fill", "masked_select", "matmul", "max", "mean", "min", "mm", "mul", "mv", "norm", "outer",
    "permute", "pow", "relu", "reshape", "rms_norm", "roll", "rsqrt", "scatter", "selu", "sigmoid", "sin",
    "softmax", "split", "sqrt", "square", "squeeze", "stack", "std", "sum", "tanh", "tensordot", "tile", "topk",
    "transpose", "tril", "triu", "unsqueeze", "var", "vmap", "where",
)  # fmt: skip

_FUNCTIONAL_LOSSES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "hinge_embedding_loss",
    "kl_div", "linear_cross_entropy",
)  # fmt: skip

# Names of torch.nn that are not layers.
_NOT_LAYERS = ("torch.nn.Module", "torch.nn.Parameter", "torch.nn.UninitializedParameter", "torch.nn.Buffer")

_CALLS = (
    # losses come before the layers and functions of the same module
    ("torch.nn.*Loss*", "loss"),
    ("torch.nn.functional.*_loss", "loss"),
    *((f"torch.nn.functional.{name}", "loss") for name in _FUNCTIONAL_LOSSES),
    *((name, "") for name in _NOT_LAYERS),
    ("torch.nn.[A-Z]*", "layer"),
    ("torch.nn.parallel.*Parallel", "device"),
    ("torch.nn.functional.[a-z]*", "op"),
    *((f"torch.{name}", "op") for name in _OPS),
    ("torch.linalg.*", "op"),
    ("torch.fft.*", "op"),
    ("torch.optim.lr_scheduler.*", "scheduler"),
    ("torch.optim.swa_utils.SWALR", "scheduler"),
    ("torch.optim.[A-Z]*", "optimizer"),
    ("torch.distributed.optim.*Optimizer", "optimizer"),
    ("torch.utils.data.[A-Z]*", "data"),
    ("torch.utils.data.random_split", "data"),
    ("torch.utils.data.distributed.*Sampler", "data"),
    ("torch.device", "device"),
    ("torch.set_default_device", "device"),
    ("torch.cuda.set_device", "device"),
    ("torch.cuda.device", "device"),
    ("torch.autocast", "device"),
    ("torch.amp.autocast", "device"),
    ("torch.cuda.amp.autocast", "device"),
    ("torch.amp.GradScaler", "optimizer"),
    ("torch.cuda.amp.GradScaler", "optimizer"),
    ("torch.save", "checkpoint"),
    ("torch.load", "checkpoint"),
    ("torch.distributed.checkpoint.*", "checkpoint"),
    ("torch.hub.load*", "model"),
    ("torch.autograd.backward", "backward"),
    ("torch.autograd.grad", "backward"),
    ("torch.compile", "model"),
    ("torch.jit.load", "model"),
    ("safetensors.torch.save*", "checkpoint"),
    ("safetensors.torch.load*", "checkpoint"),
    ("torchvision.models.[a-z]*", "model"),
    ("torchvision.models.*.[a-z]*", "model"),
    ("torchvision.datasets.[A-Z]*", "data"),
    ("torchvision.ops.*loss*", "loss"),
    ("torchvision.ops.[A-Z]*", "layer"),
    ("timm.create_model", "model"),
    ("timm.models.create_model", "model"),
    ("timm.optim.create_optimizer*", "optimizer"),
    ("timm.scheduler.create_scheduler*", "scheduler"),
    ("timm.data.create_*", "data"),
    ("transformers.get_*schedule*", "scheduler"),
    ("transformers.optimization.get_*schedule*", "scheduler"),
    ("transformers.get_scheduler", "scheduler"),
    ("transformers.AdamW", "optimizer"),
    ("transformers.Adafactor", "optimizer"),
    ("transformers.*Trainer", "trainer"),
    ("transformers.DataCollator*", "data"),
    ("transformers.*Model.from_pretrained", "model"),
    ("transformers.*For*.from_pretrained", "model"),
    ("transformers.*Model.from_config", "model"),
    ("transformers.*For*.from_config", "model"),
    ("transformers.*Model", "model"),
    ("transformers.*For[A-Z]*", "model"),
    ("transformers.pipeline", "model"),
    ("datasets.load_dataset", "data"),
    ("datasets.load_from_disk", "data"),
    ("trl.*Trainer", "trainer"),
    ("peft.get_peft_model", "model"),
    ("diffusers.*.from_pretrained", "model"),
    ("diffusers.*Model", "model"),
    ("lightning.Trainer", "trainer"),
    ("lightning.pytorch.Trainer", "trainer"),
    ("lightning.Fabric", "trainer"),
    ("lightning.fabric.Fabric", "trainer"),
    ("accelerate.Accelerator", "trainer"),
    ("deepspeed.initialize", "trainer"),
    ("bitsandbytes.optim.[A-Z]*", "optimizer"),
    ("apex.optimizers.[A-Z]*", "optimizer"),
    ("torchmetrics.*", ""),
)

_BASES = (
    ("torch.nn.*Loss", "loss"),
    ("torch.nn.[A-Z]*", "model"),
    ("torch.nn.parallel.*", "model"),
    ("torch.jit.ScriptModule", "model"),
    ("torch.optim.lr_scheduler.*", "scheduler"),
    ("torch.optim.[A-Z]*", "optimizer"),
    ("torch.optim.optimizer.Optimizer", "optimizer"),
    ("torch.utils.data.*Dataset", "data"),
    ("torch.utils.data.*Sampler", "data"),
    ("torch.utils.data.DataLoader", "data"),
    ("torchvision.datasets.*", "data"),
    ("torchvision.models.*", "model"),
    ("torchvision.models.*.[A-Z]*", "model"),
    ("transformers.*Trainer", "trainer"),
    ("transformers.*Model", "model"),
    ("transformers.*For[A-Z]*", "model"),
    ("transformers.models.*.*.*", "model"),
    ("lightning.LightningModule", "model"),
    ("lightning.pytorch.LightningModule", "model"),
    ("lightning.LightningDataModule", "data"),
    ("lightning.pytorch.LightningDataModule", "data"),
    ("torch_geometric.nn.[A-Z]*", "model"),
)

# The name of a method is ambiguous; the second word is the kind of its receiver (see name_evidence.py):
#   any         any receiver
#   model, optimizer, scheduler, trainer, data     a variable known, or named, as one
#   device      not the receiver but an argument must look like a device
_METHODS = {
    "backward": ("backward", "any"),
    "manual_backward": ("backward", "any"),
    "zero_grad": ("zero grad", "any"),
    "cuda": ("device", "any"),
    "to": ("device", "device"),
    "load_state_dict": ("checkpoint", "any"),
    "save_pretrained": ("checkpoint", "any"),
    "from_pretrained": ("model", "class"),
    "load_from_checkpoint": ("checkpoint", "any"),
    "save_checkpoint": ("checkpoint", "any"),
    "save_model": ("checkpoint", "trainer"),
    "save_state": ("checkpoint", "trainer"),
    "load_state": ("checkpoint", "trainer"),
    "prepare": ("device", "trainer"),
    "train": ("train loop", "trainer"),
    "fit": ("train loop", "trainer"),
    "evaluate": ("eval loop", "trainer"),
    "predict": ("eval loop", "trainer"),
    "test": ("eval loop", "trainer"),
    "validate": ("eval loop", "trainer"),
}

PYTORCH = Vocabulary(
    framework="PyTorch",
    roots=frozenset(
        {
            "accelerate", "apex", "bitsandbytes", "datasets", "deepspeed", "diffusers", "lightning",
            "lightning_fabric", "peft", "pytorch_lightning", "safetensors", "timm", "torch",
            "torch_geometric", "torchmetrics", "torchvision",
            "transformers", "trl",
        }
    ),
    aliases=(
        ("torch.nn.modules.module.", "torch.nn."),
        *((f"torch.nn.modules.{name}.", "torch.nn.") for name in (
            "activation", "adaptive", "batchnorm", "container", "conv", "dropout", "fold", "instancenorm", "linear",
            "loss", "normalization", "padding", "pixelshuffle", "pooling", "rnn", "sparse", "transformer", "upsampling",
        )),
        ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
        ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"),
        *((f"torch.utils.data.{name}.", "torch.utils.data.") for name in ("dataset", "dataloader", "sampler")),
        ("torch.special.", "torch."),
        ("pytorch_lightning.", "lightning.pytorch."),
        ("lightning_fabric.", "lightning.fabric."),
        ("transformers.trainer.", "transformers."),
        ("transformers.modeling_utils.", "transformers."),
    ),
    calls=_CALLS,
    bases=_BASES,
    methods=_METHODS,
    no_gradient=frozenset({"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}),
)  # fmt: skip
