"""Pipeline schedules as data: composed, proven, drawn and exported. Imports no deep-learning framework."""

from gemini.schedule.block import Action, Block
from gemini.schedule.composer import Composer
from gemini.schedule.link_costs import Links
from gemini.schedule.placements import placement
from gemini.schedule.schedplan import Pattern, Proof, SchedPlan

__all__ = ["Action", "Block", "Composer", "Links", "Pattern", "Proof", "SchedPlan", "placement"]
