"""The registry: every method of this package by name."""

import optax

from jdist import transforms
from jdist.methods import (
  _compressed_gradients,
  _diloco,
  _local_sgd,
  _method,
  _mp2,
  _overlapped,
  _synchronous,
)


def _one_bit_warmup(run: _method.Run) -> int:
  # The paper's 15 to 20 % of the run, and all of the rate's warm-up.
  return max(1, run.warmup_steps, run.num_steps // 6)


def _rate_with_momentum(run: _method.Run) -> optax.Schedule:
  # Behind a momentum progress is longer, and control variates would be too.
  factor = 1.0 / (1.0 - run.momentum) if run.optimizer == "sgd" else 1.0
  return lambda step: factor * run.learning_rate(step)


def _arxiv(
  author: str, title: str, venue: str, year: int, number: str
) -> _method.Paper:
  url = f"https://arxiv.org/abs/{number}"
  return _method.Paper(author, title, venue, year, url)


registry: dict[str, _method.Method] = {
  "ssgd": _method.Method(
    "synchronous SGD: the gradients' mean in every step", _synchronous.ssgd
  ),
  "local_sgd": _method.Method(
    "H steps each for itself, then the parameters' mean",
    _local_sgd.local_sgd,
    _arxiv(
      "Stich", "Local SGD Converges Fast and Communicates Little",
      "ICLR", 2019, "1805.09767",
    ),
  ),
  "post_local_sgd": _method.Method(
    "ssgd for the first half of the run, then local_sgd",
    _local_sgd.post_local_sgd,
    _arxiv(
      "Lin et al.", "Don't Use Large Mini-Batches, Use Local SGD",
      "ICLR", 2020, "1808.07217",
    ),
    {"switch_step": lambda run: run.num_steps // 2},
  ),
  "diloco": _method.Method(
    "local steps; their mean is a gradient for outer Nesterov",
    _diloco.diloco,
    _arxiv(
      "Douillard et al.",
      "DiLoCo: Distributed Low-Communication Training of Language Models",
      "arXiv", 2023, "2311.08105",
    ),
  ),
  "msdpu": _method.Method(
    "local steps; the mean comes a round late, H follows loss",
    _overlapped.msdpu,
    _method.Paper(
      "Ju et al.", "Multi-step delayed parameter update",
      "Journal of Harbin Institute of Technology", 2025,
      "https://doi.org/10.11918/202407052",
    ),
    {"warmup_steps": lambda run: run.warmup_steps},
    interval_policy="msdpu",
    late=transforms.Delayed(carry=None),
  ),
  "fed_prox": _method.Method(
    "local_sgd with a pull back to the round's beginning",
    _local_sgd.fed_prox,
    _arxiv(
      "Li et al.", "Federated Optimization in Heterogeneous Networks",
      "MLSys", 2020, "1812.06127",
    ),
  ),
  "easgd": _method.Method(
    "springs between the workers and a centre",
    _local_sgd.easgd,
    _arxiv(
      "Zhang, Choromanska, LeCun",
      "Deep Learning with Elastic Averaging SGD",
      "NeurIPS", 2015, "1412.6651",
    ),
  ),
  "scaffold": _method.Method(
    "local_sgd with control variates, for unequal data",
    _local_sgd.scaffold,
    _arxiv(
      "Karimireddy et al.",
      "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
      "ICML", 2020, "1910.06378",
    ),
    {"learning_rate": _rate_with_momentum},
  ),
  "slow_mo": _method.Method(
    "local_sgd with a momentum of the rounds",
    _local_sgd.slow_mo,
    _arxiv(
      "Wang et al.",
      "SlowMo: Improving Communication-Efficient Distributed SGD with Slow "
      "Momentum",
      "ICLR", 2020, "1910.00643",
    ),
  ),
  "cocod": _method.Method(
    "the last round's mean, one's own progress on top",
    _overlapped.cocod,
    _arxiv(
      "Shen et al.",
      "Faster Distributed Deep Net Training: Computation and Communication "
      "Decoupled Stochastic Gradient Descent",
      "IJCAI", 2019, "1906.12043",
    ),
  ),
  "overlap_local_sgd": _method.Method(
    "a pull to a mean that is one round late",
    _overlapped.overlap_local_sgd,
    _arxiv(
      "Wang, Liang, Joshi",
      "Overlap Local-SGD: An Algorithmic Approach to Hide Communication "
      "Delays in Distributed SGD",
      "ICASSP", 2020, "2002.09539",
    ),
  ),
  "od_sgd": _method.Method(
    "gradients one step late, a local step in between",
    _overlapped.od_sgd,
    _arxiv(
      "Xu et al.",
      "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed "
      "Training",
      "ACM TACO", 2020, "2005.06728",
    ),
    {"local_learning_rate": lambda run: run.learning_rate},
  ),
  "streaming_diloco": _method.Method(
    "diloco in fragments at staggered steps",
    _diloco.streaming_diloco,
    _arxiv(
      "Douillard et al.",
      "Streaming DiLoCo with overlapping communication: Towards a "
      "Distributed Free Lunch",
      "arXiv", 2025, "2501.18512",
    ),
    {
      "fragments": lambda run: min(4, run.interval),
      "delay_steps": lambda run: min(1, run.interval - 1),
    },
  ),
  "qsgd": _method.Method(
    "ssgd with integers of a few bits",
    _compressed_gradients.qsgd,
    _arxiv(
      "Alistarh et al.",
      "QSGD: Communication-Efficient SGD via Gradient Quantization and "
      "Encoding",
      "NeurIPS", 2017, "1610.02132",
    ),
  ),
  "terngrad": _method.Method(
    "ssgd with -1, 0 or 1 times a scale",
    _compressed_gradients.terngrad,
    _arxiv(
      "Wen et al.",
      "TernGrad: Ternary Gradients to Reduce Communication in Distributed "
      "Deep Learning",
      "NeurIPS", 2017, "1705.07878",
    ),
  ),
  "signsgd": _method.Method(
    "ssgd by majority vote on the signs of momenta",
    _compressed_gradients.signsgd,
    _arxiv(
      "Bernstein et al.",
      "signSGD with Majority Vote is Communication Efficient and Fault "
      "Tolerant",
      "ICLR", 2019, "1810.05291",
    ),
    {"momentum": lambda run: run.momentum},
    own_momentum=True,
  ),
  "ef_signsgd": _method.Method(
    "ssgd with signs, and feedback of the rest",
    _compressed_gradients.ef_signsgd,
    _arxiv(
      "Karimireddy et al.",
      "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      "ICML", 2019, "1901.09847",
    ),
  ),
  "one_bit_adam": _method.Method(
    "Adam, then signs of its momentum",
    _compressed_gradients.one_bit_adam,
    _arxiv(
      "Tang et al.",
      "1-bit Adam: Communication Efficient Large-Scale Training with Adam's "
      "Convergence Speed",
      "ICML", 2021, "2102.02888",
    ),
    {
      "warmup_steps": _one_bit_warmup,
      "weight_decay": lambda run: run.weight_decay,
    },
  ),
  "topk_sgd": _method.Method(
    "ssgd with the largest entries, and feedback",
    _compressed_gradients.topk_sgd,
    _arxiv(
      "Stich, Cordonnier, Jaggi", "Sparsified SGD with Memory",
      "NeurIPS", 2018, "1809.07599",
    ),
  ),
  "dgc": _method.Method(
    "the largest entries of momenta, fewer and fewer",
    _compressed_gradients.dgc,
    _arxiv(
      "Lin et al.",
      "Deep Gradient Compression: Reducing the Communication Bandwidth for "
      "Distributed Training",
      "ICLR", 2018, "1712.01887",
    ),
    {
      "momentum": lambda run: run.momentum,
      "nesterov": lambda run: True,
      "steps_per_phase": lambda run: run.warmup_steps or None,
    },
    own_momentum=True,
  ),
  "powersgd": _method.Method(
    "ssgd with a mean of low rank, and feedback",
    _compressed_gradients.powersgd,
    _arxiv(
      "Vogels, Karimireddy, Jaggi",
      "PowerSGD: Practical Low-Rank Gradient Compression for Distributed "
      "Optimization",
      "NeurIPS", 2019, "1905.13727",
    ),
  ),
  "demo": _method.Method(
    "signs of the fastest components of momenta",
    _compressed_gradients.demo,
    _arxiv(
      "Peng, Quesnelle, Kingma", "DeMo: Decoupled Momentum Optimization",
      "arXiv", 2024, "2411.19870",
    ),
    own_momentum=True,
  ),
  "sparse_loco": _method.Method(
    "local steps; the largest entries in 2 bits",
    _diloco.sparse_loco,
    _arxiv(
      "Sarfi et al.",
      "Communication Efficient LLM Pre-training with SparseLoCo",
      "arXiv", 2025, "2508.15706",
    ),
  ),
  "muloco": _method.Method(
    "diloco with Muon inside, in 2 bits",
    _diloco.muloco,
    _arxiv(
      "Therien et al.",
      "MuLoCo: Muon is a practical inner optimizer for DiLoCo",
      "arXiv", 2025, "2505.23725",
    ),
    {"weight_decay": lambda run: run.weight_decay},
  ),
  "mp2": _method.Method(
    "the front layers' mean; a network predicts the others", _mp2.mp2
  ),
}  # fmt: skip
