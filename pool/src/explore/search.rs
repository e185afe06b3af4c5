//! Breadth-first search of all states.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::world::{Step, World};

/// The result of a search.
pub(super) enum Found {
    Nothing {
        states: usize,
    },
    Violation {
        property: String,
        /// The shortest path to it, one line for each step.
        way: Vec<String>,
    },
}

/// Visits each state that can be reached from `start` once.
pub(super) fn explore(start: World) -> Found {
    // Each state, with the index of its predecessor and the step between them.
    let mut ways: Vec<(World, usize, Option<Step>)> = vec![(start.clone(), 0, None)];
    let mut known = HashMap::from([(start, ())]);
    let mut at = 0;
    while at < ways.len() {
        let world = ways[at].0.clone();
        for step in world.steps() {
            // The invariants of a slot are assertions of the pool.
            let taken = catch_unwind(AssertUnwindSafe(|| world.take(step)));
            let taken = taken.unwrap_or_else(|_| Err("the invariants of a slot hold".to_owned()));
            match taken.and_then(|next| next.check().map(|()| next)) {
                Err(property) => {
                    let mut way = way_to(&ways, at);
                    way.push(format!("{step:?}"));
                    return Found::Violation { property, way };
                }
                Ok(next) => {
                    if known.insert(next.clone(), ()).is_none() {
                        ways.push((next, at, Some(step)));
                    }
                }
            }
        }
        at += 1;
    }
    let states = ways.len();
    Found::Nothing { states }
}

fn way_to(ways: &[(World, usize, Option<Step>)], mut at: usize) -> Vec<String> {
    let mut way = Vec::new();
    while let (world, before, Some(step)) = &ways[at] {
        way.push(format!("{step:?} ─► {}", world.summary()));
        at = *before;
    }
    way.reverse();
    way
}
