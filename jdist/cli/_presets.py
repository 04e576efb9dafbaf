"""Presets: defaults of options for a data set."""

# What a preset changes. Presets are for both commands: a learning rate of
# several values is a grid for `compare`, and its first value is `train`'s.
PRESETS: dict[str, dict[str, object]] = {
  # 144 held-out digits, all of which a lucky seed has right at any rate.
  "digits": {"learning_rate": (0.1, 0.025, 0.05, 0.2), "tuning_seeds": 3},
  "mnist": {
    "dataset": "mnist",
    "model": "lenet",
    "epochs": 2.0,
    "warmup_epochs": 0.1,
    "evaluate_every_epochs": 0.5,
    "learning_rate": (0.05,),
  },
  "cifar10": {
    "dataset": "cifar10",
    "model": "cnn",
    "epochs": 4.0,
    "warmup_epochs": 0.5,
    "evaluate_every_epochs": 0.5,
    "learning_rate": (0.05,),
  },
  "cifar10-gpu": {
    "dataset": "cifar10",
    "model": "resnet20",
    "batch_size": 1024,
    "epochs": 160.0,
    "warmup_epochs": 5.0,
    "weight_decay": 5e-4,
    "evaluate_every_epochs": 5.0,
    "learning_rate": (0.4,),
    "dtype": "bfloat16",
    "stream": True,
  },
  "tiny_shakespeare": {
    "dataset": "tiny_shakespeare",
    "model": "transformer",
    "window_length": 64,
    "num_layers": 2,
    "width": 64,
    "epochs": 2.0,
    "warmup_epochs": 0.1,
    "evaluate_every_epochs": 0.5,
    "optimizer": "adamw",
    "learning_rate": (0.01,),
  },
}
