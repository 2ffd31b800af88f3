"""Facts about one captured training step: bytes and counts, no opinions.

The analysis passes write them, the planner reads them. Plain data without torch, so that a
plan can be made on a machine that has never seen the model. Positions are indices into
`Facts.nodes`, the nodes of the joint graph in their order of execution. Seconds per byte
belong to `Machine`; only the forecast multiplies the two.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a storage holds, as a reader of a memory profile would name it."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"  # of a parameter, until it is reduced or handed to autograd
    BUFFER = "buffer"
    INPUT = "input"
    OUTPUT = "output"  # handed to the caller: not counted against a budget
    ACTIVATION = "activation"  # born in the forward, read in the backward
    TEMPORARY = "temporary"  # born and dead within one phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One piece of memory, however many views look at it.

    `born` is the position of the node that allocates it, `dies` the position of its last
    reader, `readers` every position that reads it or one of its views, ascending.
    `path` is the module or parameter path it belongs to, `source` the user's "file:line";
    either may be empty.
    """

    name: str
    role: Role
    path: str
    source: str
    nbytes: int
    born: int
    dies: int
    readers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one node costs on the compute device. `source`: measured, roofline or free."""

    node: str
    seconds: float
    flops: int
    bytes: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter (a tied one once, under its first name; the others are `aliases`).

    `reads` are the positions of the nodes that read it or a view of it, in forward and
    backward, ascending; none for a parameter that this graph does not have. `trainable`: it
    requires a gradient, here or in another graph; `gradient` is the position of the node that
    completes it, None where none is computed, `gradient_storage` the name of the storage that
    it lies in, which two parameters may share. `span` is the elements from its first to its
    last, which is numel for a dense layout. `pinned` is a tier's name if the user fixed its home.
    """

    path: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    span: int
    trainable: bool
    reads: tuple[int, ...]
    gradient: int | None
    gradient_storage: str = ""
    pinned: str | None = None

    @property
    def nbytes(self) -> int:
        return self.span * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Bytes that one parameter would send over a link, each time it moves that way."""

    path: str
    gather_bytes: int  # the parameter, home -> device
    reduce_bytes: int  # its gradient, device -> home (and back, to accumulate)
    state_bytes: int  # its optimizer states, home -> device and back


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What an optimizer keeps and needs, learned by stepping it once on a small tensor.

    `states` are (name, bytes per element of the parameter) of the element-wise states,
    `scratch_bytes` the largest temporary memory of one update per element of the parameter
    under way, `read_bytes` the memory traffic of one update per element.
    `elementwise` is False for optimizers that need a parameter whole (Adafactor, Muon) and
    `global_state` True for those that need all parameters at once (LBFGS).
    `foreach` says that one call works on all parameters given to it at once, so that its
    scratch grows with all of them. Where parameters have several dtypes, `by_dtype` holds
    the facts for each, and the numbers here are those of the widest.
    """

    name: str
    states: tuple[tuple[str, int], ...]
    scratch_bytes: int
    read_bytes: int
    elementwise: bool = True
    global_state: bool = False
    foreach: bool = False
    by_dtype: "tuple[tuple[str, OptimizerFacts], ...]" = ()

    def of(self, dtype: str) -> "OptimizerFacts":
        """The facts for parameters of one dtype ("bfloat16")."""
        return next((facts for name, facts in self.by_dtype if name == dtype), self)

    @property
    def state_bytes(self) -> int:
        """Bytes of element-wise state per element of a parameter."""
        return sum(size for _, size in self.states)


def again(name: str) -> str:
    """What the repetition of a node, and its memory, is called."""
    return f"{name}_again"


@dataclass(frozen=True, slots=True)
class Flow:
    """What one node computes from, by positions.

    `sources` are the nodes that it reads, `root` the one that allocated the memory of its result
    (itself, but for views and in-place operations). `repeats`: computed again from the same
    sources it gives the same bits and changes nothing else; False for what draws random numbers
    or writes in place. `derives` is the path of the parameter that its value follows from alone,
    by views and cheap copies. `checkpointed`: the model wants it computed again.
    """

    sources: tuple[int, ...]
    root: int
    repeats: bool
    derives: str = ""
    checkpointed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """A storage that leaves the device in the forward and comes back in the backward.

    It is copied away after the node at `leaves`, its last reader in the forward, and read back
    into the gather area for the positions `first` to `last`.
    """

    storage: str
    nbytes: int
    leaves: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that is known of a step before anything is decided.

    `backward` is the position of the first backward node; len(nodes) if there is none.
    `costs[i]` and `flow[i]` belong to `nodes[i]`. `parameters` stand in order of first use.
    """

    key: str  # a stable digest of the graph: same step, same key
    nodes: tuple[str, ...]
    backward: int
    costs: tuple[Cost, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    moves: tuple[Moves, ...] = ()
    buffer_bytes: int = 0
    optimizer: OptimizerFacts | None = None
    missing: tuple[str, ...] = field(default=())  # operator keys that nobody measured
    flow: tuple[Flow, ...] = ()  # by node; empty where activations are not the planner's to choose
    departures: tuple[Departure, ...] = ()  # decided already (see planner.activations)

    @property
    def trains(self) -> bool:
        return self.backward < len(self.nodes)

    def updates(self, parameter: Parameter) -> bool:
        """Whether the optimizer changes a parameter in this step."""
        return self.trains and parameter.trainable and parameter.gradient is not None

    @property
    def compute_s(self) -> float:
        return sum(cost.seconds for cost in self.costs)
