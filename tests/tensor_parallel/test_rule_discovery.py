"""Discovery tries every layout that a rule admits, on random shapes: forward and backward are those of the whole."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.errors import ShardingError
from gemini.tensor_parallel.annotation import Annotation
from gemini.tensor_parallel.layouts import Shard, layout_text
from gemini.tensor_parallel.rule_discovery import try_rules, verify_rules
from gemini.tensor_parallel.rules import registry
from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.planned_models import NAMES, opened, transformer, transformer_graph
from tests.tensor_parallel.shard_comparison import SLOW, compare

pytestmark = pytest.mark.unit


class Op(nn.Module):
    """A function of the input and parameters of given shapes, each a function of its own."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x):
        return self.function(x * 1.0, *self.weights)


def heads(x, count=4):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def grouped(x, q, k):
    queries, keys = heads(x @ q, 4), heads(x @ k, 2)
    return F.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)


def rotary(x):
    one, two = x.chunk(2, -1)
    return x * torch.linspace(0, 1, 8).to(x) + torch.cat((-two, one), -1)


def indexed(x):
    return x[:, [0, 2, 1]] + x[:, 1:4, :] + x[..., None, :3, :].squeeze(-3)


def filled(x, w):
    made = x.new_zeros(3, 6, 16)
    made[..., :8] = x @ w
    made[..., 8:] = x
    return made


def transposed(x, w, b, grouped):
    return F.conv_transpose1d(x, w, b, stride=2, output_padding=1) + F.conv_transpose1d(
        x, grouped, stride=2, padding=0, output_padding=1, groups=4
    )


CASES = {
    "linear": (F.linear, (3, 6, 8), (12, 8), (12,)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (6, 8), (8, 12), (12,)),
    "baddbmm": (lambda x, w, c: torch.baddbmm(c, x, w), (4, 6, 8), (4, 8, 12), (4, 6, 12)),
    "einsum": (lambda x, w: torch.einsum("bsh,hnd->bnsd", x, w), (3, 6, 8), (8, 4, 2)),
    "matmul": (lambda x, w: heads(x @ w) @ heads(x).transpose(-1, -2), (3, 6, 8), (8, 8)),
    "conv": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (3, 8, 6), (12, 8, 3), (12,)),
    "grouped conv": (lambda x, w: F.conv2d(x, w, groups=4), (3, 8, 6, 6), (12, 2, 3, 3)),
    "transposed conv": (transposed, (3, 8, 6), (8, 12, 4), (12,), (8, 3, 4)),
    "pairs": (lambda x, w: (x @ w)[..., ::2].sigmoid() * (x @ w)[..., 1::2] + x[:, 1::2].mean((1, 2), True),
              (3, 6, 8), (8, 16)),
    "layer": (lambda x, w, b: F.rms_norm(x, (8,), w) + F.layer_norm(x, (6, 8), b), (3, 6, 8), (8,), (6, 8)),
    "embedding": (lambda x, w: F.embedding((x[..., 0] * 3).abs().long() % 12, w, padding_idx=0), (3, 6, 8), (12, 8)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (3, 6, 8), (8,), (8,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (3, 8, 6), (8,), (8,)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (3, 8, 6), (8,), (8,)),
    "attention": (lambda x, w: F.scaled_dot_product_attention(heads(x @ w), heads(x), heads(x)), (3, 6, 8), (8, 8)),
    "grouped heads": (grouped, (3, 6, 8), (8, 16), (8, 8)),
    "rotary": (rotary, (3, 4, 6, 8)),
    "softmax": (lambda x: x.softmax(-1) * x.log_softmax(1), (3, 6, 8)),
    "reductions": (lambda x: x.sum(-1, keepdim=True) + x.mean(1, keepdim=True) + x.amax(-1, True), (3, 6, 8)),
    "variance": (lambda x: x.var(-1, keepdim=True) * x.norm(dim=1, keepdim=True), (3, 6, 8)),
    "views": (lambda x: x.view(3, 6, 4, 2).permute(0, 2, 1, 3).reshape(3, 4, 12).flatten(1), (3, 6, 8)),
    "split": (lambda x: torch.cat([part * at for at, part in enumerate(x.split(4, -1), 1)], 1), (3, 6, 8)),
    "stack": (lambda x: torch.stack(x.unbind(1), -1).repeat_interleave(2, 1), (3, 6, 8)),
    "index": (indexed, (3, 6, 8)),
    "gather": (lambda x: x.gather(1, (x.abs() * 2).long() % 6) + x.roll(1, 1).flip(-1), (3, 6, 8)),
    "expand": (lambda x, w: w.expand(3, 6, 8) * x + w[None].broadcast_to(3, 6, 8), (3, 6, 8), (6, 8)),
    "casts": (lambda x: x.float().double().type_as(x) + x.cumsum(1).tril(), (3, 6, 8)),
    "masked": (lambda x: x.masked_fill(x > 1, 0.0).where(x > 0, x * 2), (3, 6, 8)),
    "gated": (lambda x: F.glu(x, -1) + F.silu(x[..., :4]) * x[..., 4:], (3, 6, 8)),
    "pad": (lambda x: F.pad(x, (1, 1)) + F.pad(x, (0, 2), value=0.0), (3, 6, 8)),
    "pool": (lambda x: F.avg_pool1d(x, 2) + F.max_pool1d(x, 2), (3, 6, 8)),
    "prelu": (F.prelu, (3, 8, 6), (8,)),
    "filled": (filled, (3, 6, 8), (8, 8)),
    "cosine": (lambda x, w: F.cosine_similarity(x, w, dim=-1) + F.normalize(x, dim=-1)[..., 0], (3, 6, 8), (6, 8)),
    "losses": (lambda x, w: F.mse_loss(x, w.expand_as(x), reduction="none") + F.huber_loss(x, w.expand_as(x)),
               (3, 6, 8), (6, 8)),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), (3, 6, 8), (12, 8, 8)),
    "sampled": (lambda x, w: F.grid_sample(x, (x[..., :2] * 0.3).mean(1) + w), (3, 8, 6, 6), (3, 6, 6, 2)[1:]),
    "weight norm": (lambda x, v, g: F.linear(x, torch._weight_norm(v, g, 0)), (3, 6, 8), (12, 8), (12, 1)),
    "grouped product": (lambda x, w: torch.einsum("ebk,ekn->ebn", x, w), (4, 6, 8), (4, 8, 12)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_that_a_rule_admits_is_right(case, size):
    function, shape, *weights = CASES[case]
    torch.manual_seed(2)
    if case == "sampled":
        weights = [(6, 2)]
        function = lambda x, w: F.grid_sample(x, (x[:, 0, :, :2, None] * 0.3).transpose(2, 3) + w[None, :, None])
    model, x = Op(function, *weights).double(), torch.randn(shape).double()
    trial = verify_rules(opened(model, x), (x,), {}, size)
    assert trial.tried
    assert not trial.refuted


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixtral"])
def test_the_layouts_of_transformers_are_right(name):
    graph = transformer_graph(name)
    trial = verify_rules(graph, (), transformer(name)[1])
    assert sum(trial.tried.values()) > 100
    assert {"linear", "add", "mul"} & set(trial.tried)


# ── rules of users ─────────────────────────────────────────────────────────────────────────────────────────────────
class Twist(torch.autograd.Function):
    """A custom product."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.sin()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.sin().T, (x.flatten(0, 1).T @ grad.flatten(0, 1)) * weight.cos()


TWIST = f"{__name__}:Twist"


class Twisted(nn.Module):
    """A model with a custom product."""

    def __init__(self, wide=64):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, wide)), nn.Linear(wide, 16)

    def forward(self, x):
        return self.down(Twist.apply(x, self.up).tanh())


@pytest.fixture
def twisted(monkeypatch):
    registry.find_shard_rule("linear")
    monkeypatch.setattr(registry, "SHARD_RULES", dict(registry.SHARD_RULES))
    torch.manual_seed(0)
    x = torch.randn(3, 6, 16).double()
    return opened(Twisted().double(), x), x


def test_an_annotated_function_is_sharded(twisted):
    graph, x = twisted
    assert "up" not in {one.name for one in plan_shards(graph, 2, costs=SLOW).tensors if isinstance(one.layout, Shard)}
    registry.annotate(TWIST, "b s h, h o -> b s o")
    verify_rules(graph, (x,), {})
    plan = plan_shards(graph, 2, costs=SLOW)
    assert layout_text(plan.tensor("up").layout) == "S1"
    compare(graph, plan, x)


def test_a_wrong_annotation_is_refuted_with_op_layout_and_difference(twisted):
    x = twisted[1]
    graph = opened(Twisted(16).double(), x)
    registry.annotate(TWIST, "b s h, o h -> b s o")
    with pytest.raises(ShardingError, match=r"Twist.*with \(.*S.*\) → .*: forward (differs by|fails)"):
        verify_rules(graph, (x,), {})


def test_a_dimension_that_stays_whole_is_not_divided(twisted):
    graph, x = twisted
    registry.annotate(TWIST, "b s h^, h o^ -> b s o")
    trial = try_rules(graph, (x,), {})
    assert not trial.refuted
    plan = plan_shards(graph, 2, costs=SLOW)
    assert not isinstance(plan.tensor("up").layout, Shard)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("b h", "has no result"),
        ("b h, h o -> b p", "'p' is in no argument"),
        ("b b -> b", "names a dimension twice"),
        ("b h! -> b", "'h!' is no name"),
        ("b * -> b", r"'\*' is no name"),
    ],
)
def test_faulty_annotations_are_refused(text, fault):
    with pytest.raises(ShardingError, match=fault):
        Annotation.read(text)


def test_rules_of_installed_packages_are_loaded(tmp_path, monkeypatch):
    info = tmp_path / "my_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-ops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gemini.shard_rules]\nmy_ops = my_shard_rules\n")
    (tmp_path / "my_shard_rules.py").write_text(
        "from gemini.tensor_parallel.rules.registry import annotate\nannotate('my_op', 'b h, h o -> b o')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "SHARD_RULES", dict(registry.SHARD_RULES))
    registry._load.cache_clear()
    try:
        assert registry.find_shard_rule("my_op").text == "b h, h o -> b o"
        (tmp_path / "my_shard_rules.py").write_text("import nothing_of_this_name\n")
        monkeypatch.delitem(__import__("sys").modules, "my_shard_rules")
        registry._load.cache_clear()
        with pytest.raises(ShardingError, match=r"my_ops .*cannot be imported"):
            registry.find_shard_rule("my_op")
    finally:
        registry._load.cache_clear()
