"""The planner: facts, a machine and limits in, a plan out. Pure data, no torch.

pack      which parameters move together            chunks
place     where gathered chunks stay, from when     stays
footprint what a layout holds on every tier         bytes
wires     links played in time                      events
forecast  one steady step of a schedule             seconds
bound     what no plan can beat                     seconds
draft     a whole layout from one choice            layout, stays
search    the best choice                           plan
repeated  a step that computes activations again    facts
decisions what may become of activations            facts
estimate  which decisions promise most              decisions
activations what is kept, with everything else      plan
arrivals  regions that come one at a time           plan
shapes    facts at other sizes of the inputs        facts, demand
polynomials  what is live, at any size              formulas
check     a plan that somebody gave                 errors
arranged  a whole plan from given decisions         plan
baselines what others would decide                  plans
elixir_rule  what the paper's rule would            plan
relaxation what no plan can beat, by bytes and time seconds
explanation  what a plan's memory buys              plan
"""

from elixir_fx.planner.activations import schedule, search, smallest
from elixir_fx.planner.check import check_plan
from elixir_fx.planner.decisions import decided
from elixir_fx.planner.explanation import explained
from elixir_fx.planner.footprint import live_peak_bytes
from elixir_fx.planner.shapes import Formulas, Values, at, demand

__all__ = [
    "Formulas",
    "Values",
    "at",
    "check_plan",
    "decided",
    "demand",
    "explained",
    "live_peak_bytes",
    "schedule",
    "search",
    "smallest",
]
