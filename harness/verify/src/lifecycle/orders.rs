//! The orders in which the calls on a sandbox may have taken effect, without redundant ones.
//!
//! A call without a response may take effect at any later time, or never. Of two orders with the same state and the
//! same answered calls, the one in which fewer unanswered calls have taken effect can continue in every way that
//! the other can, so only it is kept. Without this rule, each unanswered call would double the number of orders.

use std::collections::{BTreeMap, BTreeSet};

use super::oracle::State;

/// Calls that have begun and may take effect.
#[derive(Debug, Default)]
pub(super) struct Open {
    /// Each takes effect before its response.
    pub(super) answered: BTreeSet<usize>,
    pub(super) unanswered: BTreeSet<usize>,
}

impl Open {
    /// The open calls that have not taken effect in this order.
    pub(super) fn without<'a>(&'a self, order: &'a Order) -> impl Iterator<Item = usize> + 'a {
        let answered = self.answered.difference(&order.answered);
        answered
            .chain(self.unanswered.difference(&order.unanswered))
            .copied()
    }
}

/// An order of calls: its result, and the open calls that have taken effect in it.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) state: State,
    pub(super) answered: BTreeSet<usize>,
    pub(super) unanswered: BTreeSet<usize>,
}

impl Order {
    /// This order, and then the call `at`, with the state `after`.
    pub(super) fn then(mut self, at: usize, after: State, open: &Open) -> Self {
        self.state = after;
        if open.answered.contains(&at) {
            self.answered.insert(at);
        } else {
            self.unanswered.insert(at);
        }
        self
    }
}

/// A set of orders. Of the sets of unanswered calls, only the minimal ones are kept.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders(BTreeMap<(State, BTreeSet<usize>), Vec<BTreeSet<usize>>>);

impl Orders {
    /// Adds an order. Returns `false` if the set already contains an order that covers it.
    pub(super) fn insert(&mut self, order: Order) -> bool {
        let kept = self.0.entry((order.state, order.answered)).or_default();
        if kept.iter().any(|less| less.is_subset(&order.unanswered)) {
            return false;
        }
        kept.retain(|more| !order.unanswered.is_subset(more));
        kept.push(order.unanswered);
        true
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Order> + '_ {
        self.0.iter().flat_map(|((state, answered), kept)| {
            kept.iter().map(|unanswered| Order {
                state: *state,
                answered: answered.clone(),
                unanswered: unanswered.clone(),
            })
        })
    }

    /// The orders in which the call `at` has taken effect. The call is no longer open.
    pub(super) fn with(self, at: usize) -> Self {
        let mut with = Self::default();
        for mut order in self.iter() {
            if order.answered.remove(&at) {
                with.insert(order);
            }
        }
        with
    }

    pub(super) fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<State> for Orders {
    fn from_iter<I: IntoIterator<Item = State>>(states: I) -> Self {
        let mut orders = Self::default();
        for state in states {
            orders.insert(Order {
                state,
                answered: BTreeSet::new(),
                unanswered: BTreeSet::new(),
            });
        }
        orders
    }
}
