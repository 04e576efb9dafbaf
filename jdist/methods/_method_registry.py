"""The registry: every method of this package by name."""

import optax

from jdist.methods import (
  _compressed_gradients,
  _diloco,
  _local_sgd,
  _method,
  _mp2,
  _overlapped,
)

_ARXIV = "https://arxiv.org/abs/"


def _one_bit_warmup(run: _method.Run) -> int:
  # The paper takes 15 to 20 % of the run.  The variance must not be frozen
  # while the learning rate still rises.
  return max(1, run.warmup_steps, run.num_steps // 6)


def _rate_with_momentum(run: _method.Run) -> optax.Schedule:
  # A momentum m makes progress up to 1 / (1 - m) times longer, and control
  # variates, which are progress per rate, would grow by the same factor.
  factor = 1.0 / (1.0 - run.momentum) if run.optimizer == "sgd" else 1.0
  return lambda step: factor * run.learning_rate(step)


registry: dict[str, _method.Method] = {  # Every method by its name.
  "ssgd": _method.Method(
    "synchronous SGD: the mean of the gradients in every step",
    _compressed_gradients.ssgd,
  ),
  "local_sgd": _method.Method(
    "H local steps, then the mean of the parameters", _local_sgd.local_sgd,
    _method.Paper("Stich", "Local SGD Converges Fast and Communicates Little",
      "ICLR 2019", _ARXIV + "1805.09767"),
  ),
  "post_local_sgd": _method.Method(
    "ssgd in the first half of the run, then local_sgd",
    _local_sgd.post_local_sgd,
    _method.Paper("Lin et al.", "Don't Use Large Mini-Batches, Use Local SGD",
      "ICLR 2020", _ARXIV + "1808.07217"),
    # The paper switches at the first decay of the rate, halfway or later.
    {"switch_step": lambda run: run.num_steps // 2},
  ),
  "diloco": _method.Method(
    "local steps; their mean is a gradient for outer Nesterov", _diloco.diloco,
    _method.Paper("Douillard et al.", "DiLoCo: Distributed Low-Communication "
      "Training of Language Models", "arXiv 2023", _ARXIV + "2311.08105"),
  ),
  "msdpu": _method.Method(
    "H grows as the rate falls, and then the mean is late",
    _overlapped.msdpu,
    _method.Paper("Ju et al.", "Multi-step delayed parameter update",
      "Journal of Harbin Institute of Technology 2025",
      "https://doi.org/10.11918/202407052"),
    # The delay begins with the first long round, which the rule decides.
    interval_policy="growth",
    late=_overlapped.MSDPU_DELAY,
  ),
  "fed_prox": _method.Method(
    "local_sgd with a pull towards the start of the round", _local_sgd.fed_prox,
    _method.Paper("Li et al.", "Federated Optimization in Heterogeneous "
      "Networks", "MLSys 2020", _ARXIV + "1812.06127"),
  ),
  "easgd": _method.Method(
    "elastic springs between the workers and a centre", _local_sgd.easgd,
    _method.Paper("Zhang, Choromanska, LeCun", "Deep Learning with Elastic "
      "Averaging SGD", "NeurIPS 2015", _ARXIV + "1412.6651"),
  ),
  "scaffold": _method.Method(
    "local_sgd with control variates, for unequal data", _local_sgd.scaffold,
    _method.Paper("Karimireddy et al.", "SCAFFOLD: Stochastic Controlled "
      "Averaging for Federated Learning", "ICML 2020", _ARXIV + "1910.06378"),
    {"learning_rate": _rate_with_momentum},
  ),
  "slow_mo": _method.Method(
    "local_sgd with a momentum over rounds", _local_sgd.slow_mo,
    _method.Paper("Wang et al.", "SlowMo: Improving Communication-Efficient "
      "Distributed SGD with Slow Momentum", "ICLR 2020", _ARXIV + "1910.00643"),
  ),
  "cocod": _method.Method(
    "the previous round's mean plus the worker's own progress",
    _overlapped.cocod,
    _method.Paper("Shen et al.", "Faster Distributed Deep Net Training: "
      "Computation and Communication Decoupled Stochastic Gradient Descent",
      "IJCAI 2019", _ARXIV + "1906.12043"),
  ),
  "overlap_local_sgd": _method.Method(
    "a pull towards a mean that is one round late",
    _overlapped.overlap_local_sgd,
    _method.Paper("Wang, Liang, Joshi", "Overlap Local-SGD: An Algorithmic "
      "Approach to Hide Communication Delays in Distributed SGD",
      "ICASSP 2020", _ARXIV + "2002.09539"),
  ),
  "od_sgd": _method.Method(
    "gradients one step late, with a local step in between", _overlapped.od_sgd,
    _method.Paper("Xu et al.", "OD-SGD: One-step Delay Stochastic Gradient "
      "Descent for Distributed Training",
      "ACM TACO 2020", _ARXIV + "2005.06728"),
    # The paper tunes this rate; here the rate of the optimizer is the default.
    {"local_learning_rate": lambda run: run.learning_rate},
  ),
  "streaming_diloco": _method.Method(
    "diloco in fragments at staggered steps", _diloco.streaming_diloco,
    _method.Paper("Douillard et al.", "Streaming DiLoCo with overlapping "
      "communication: Towards a Distributed Free Lunch",
      "arXiv 2025", _ARXIV + "2501.18512"),
    # A short interval has neither four steps to stagger nor one to be late.
    {
      "fragments": lambda run: min(4, run.interval),
      "delay_steps": lambda run: min(1, run.interval - 1),
    },
    interval_policy=None,
  ),
  "qsgd": _method.Method(
    "ssgd with integers of a few bits", _compressed_gradients.qsgd,
    _method.Paper("Alistarh et al.", "QSGD: Communication-Efficient SGD via "
      "Gradient Quantization and Encoding",
      "NeurIPS 2017", _ARXIV + "1610.02132"),
  ),
  "terngrad": _method.Method(
    "ssgd with -1, 0 or 1 times a scale", _compressed_gradients.terngrad,
    _method.Paper("Wen et al.", "TernGrad: Ternary Gradients to Reduce "
      "Communication in Distributed Deep Learning",
      "NeurIPS 2017", _ARXIV + "1705.07878"),
  ),
  "signsgd": _method.Method(
    "ssgd by majority vote on the signs of momenta",
    _compressed_gradients.signsgd,
    _method.Paper("Bernstein et al.", "signSGD with Majority Vote is "
      "Communication Efficient and Fault Tolerant",
      "ICLR 2019", _ARXIV + "1810.05291"),
    # Signum's momentum precedes the vote; the run's optimizer must have none.
    {"momentum": lambda run: run.momentum},
    own_momentum=True,
  ),
  "ef_signsgd": _method.Method(
    "ssgd with signs and error feedback", _compressed_gradients.ef_signsgd,
    _method.Paper("Karimireddy et al.", "Error Feedback Fixes SignSGD and "
      "other Gradient Compression Schemes", "ICML 2019", _ARXIV + "1901.09847"),
  ),
  "one_bit_adam": _method.Method(
    "Adam, then the signs of its momentum", _compressed_gradients.one_bit_adam,
    _method.Paper("Tang et al.", "1-bit Adam: Communication Efficient "
      "Large-Scale Training with Adam's Convergence Speed",
      "ICML 2021", _ARXIV + "2102.02888"),
    {
      "warmup_steps": _one_bit_warmup,
      "weight_decay": lambda run: run.weight_decay,
    },
  ),
  "topk_sgd": _method.Method(
    "ssgd with the largest entries and error feedback",
    _compressed_gradients.topk_sgd,
    _method.Paper("Stich, Cordonnier, Jaggi", "Sparsified SGD with Memory",
      "NeurIPS 2018", _ARXIV + "1809.07599"),
  ),
  "dgc": _method.Method(
    "the largest entries of momenta, fewer in each warm-up phase",
    _compressed_gradients.dgc,
    _method.Paper("Lin et al.", "Deep Gradient Compression: Reducing the "
      "Communication Bandwidth for Distributed Training",
      "ICLR 2018", _ARXIV + "1712.01887"),
    {
      "momentum": lambda run: run.momentum,
      # The SGD of a run has Nesterov's momentum, too.
      "nesterov": lambda run: True,
      "steps_per_phase": lambda run: run.warmup_steps or None,
    },
    own_momentum=True,
  ),
  "powersgd": _method.Method(
    "ssgd with a low-rank mean and error feedback",
    _compressed_gradients.powersgd,
    _method.Paper("Vogels, Karimireddy, Jaggi", "PowerSGD: Practical Low-Rank "
      "Gradient Compression for Distributed Optimization",
      "NeurIPS 2019", _ARXIV + "1905.13727"),
  ),
  "demo": _method.Method(
    "the signs of the fastest components of momenta",
    _compressed_gradients.demo,
    _method.Paper("Peng, Quesnelle, Kingma", "DeMo: Decoupled Momentum "
      "Optimization", "arXiv 2024", _ARXIV + "2411.19870"),
    own_momentum=True,
  ),
  "sparse_loco": _method.Method(
    "local steps; their largest changes in 2 bits", _diloco.sparse_loco,
    _method.Paper("Sarfi et al.", "Communication Efficient LLM Pre-training "
      "with SparseLoCo", "arXiv 2025", _ARXIV + "2508.15706"),
  ),
  "muloco": _method.Method(
    "diloco with Muon as the inner optimizer, in 2 bits", _diloco.muloco,
    _method.Paper("Therien et al.", "MuLoCo: Muon is a practical inner "
      "optimizer for DiLoCo", "arXiv 2025", _ARXIV + "2505.23725"),
    {"weight_decay": lambda run: run.weight_decay},
  ),
  "mp2": _method.Method(
    "the mean of the front layers; a network predicts the rest", _mp2.mp2,
  ),
}  # fmt: skip
