"""One method per file: Gramian in, weights on the raw rows out."""

from gradbalance.balancers.base import Balancer, ConstantBalancer, StatefulBalancer
from gradbalance.balancers.fixed import Fixed
from gradbalance.balancers.marble import MARBLE
from gradbalance.balancers.mean import Mean
from gradbalance.balancers.mgda import MGDA
from gradbalance.balancers.nash_mtl import NashMTL

__all__ = ["MARBLE", "MGDA", "Balancer", "ConstantBalancer", "Fixed", "Mean", "NashMTL", "StatefulBalancer"]
